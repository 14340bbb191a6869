; A machine's whole ROM for `bochs.py`: it takes requests from the first disk, calls what they say, and stops at a magic
; breakpoint (xchg bx, bx) before each, where the other side reads results and writes the next request to the disk.
;
; A request is a sector with its numbers (HEADER) and sectors that go to physical memory from 16 MiB on, page tables among
; them. The calls are made with these page tables, whose first GiB is ours.
;
; The segment is 64 KiB at 0xF0000, where the processor begins 16 bytes before the end. All numbers are of 64 bits.

ROM         equ 0xF0000
TABLES      equ 0x1000          ; page tables: the first GiB as it is, in pages of 2 MiB
STATUS      equ 0x5000          ; what was left of the calls; vector, error code, address, cr2 of what ended them
HEADER      equ 0x6000          ; sectors, cr3, calls, address of the calls: function and six arguments each
STACK       equ 0x90000
PAYLOAD     equ 0x1000000

        org ROM
        bits 16
start:
        cli
        cld
        in al, 0x92             ; all address lines
        or al, 2
        and al, 0xfe
        out 0x92, al
        xor ax, ax
        mov ds, ax
        mov ss, ax
        mov sp, 0x800
        mov ax, TABLES >> 4
        mov es, ax
        xor di, di
        xor eax, eax
        mov cx, 0x3000 / 4
        rep stosd
        mov dword [es:0], TABLES + 0x1003
        mov dword [es:0x1000], TABLES + 0x2003
        mov di, 0x2000
        mov eax, 0x83
        mov cx, 512
.page:  mov [es:di], eax
        add eax, 0x200000
        add di, 8
        loop .page
        mov ax, ROM >> 4
        mov es, ax
        a32 o32 lgdt [es:gdt.place - ROM]
        a32 o32 lidt [es:idt.place - ROM]
        mov eax, cr4
        or eax, 0x620           ; PAE, OSFXSR, OSXMMEXCPT
        mov cr4, eax
        mov eax, TABLES
        mov cr3, eax
        mov ecx, 0xC0000080     ; EFER: long mode, pages that nothing is executed from
        rdmsr
        or eax, 0x900
        wrmsr
        mov eax, cr0
        and eax, 0x9FFFFFF3     ; caches on; neither EM nor TS
        or eax, 0x80010023      ; PG, WP, NE, MP, PE
        mov cr0, eax
        jmp dword 8:long_mode

        bits 64
long_mode:
        mov ax, 16
        mov ds, ax
        mov es, ax
        mov ss, ax
        mov rsp, STACK
        fninit
        mov eax, 1
        cpuid
        bt ecx, 26              ; XSAVE
        jnc next
        mov rax, cr4
        or eax, 0x40000         ; OSXSAVE
        mov cr4, rax
        mov eax, 0xD            ; XCR0: all vector states that the processor has
        xor ecx, ecx
        cpuid
        and eax, 0xE7
        xor edx, edx
        xor ecx, ecx
        xsetbv

next:
        xchg bx, bx
        mov rsp, STACK
        xor ebx, ebx            ; the sector
        mov rdi, HEADER
        call sector
        mov rdi, PAYLOAD
        mov rbp, [abs HEADER]
.more:  test rbp, rbp
        jz .there
        call sector
        dec rbp
        jmp .more
.there: mov rax, [abs HEADER + 16]
        mov [abs STATUS], rax
        mov qword [abs STATUS + 8], -1
        mov rax, [abs HEADER + 8]
        mov cr3, rax
        mov rbx, [abs HEADER + 24]
.call:  cmp qword [abs STATUS], 0
        je done
        mov rdi, [rbx + 8]
        mov rsi, [rbx + 16]
        mov rdx, [rbx + 24]
        mov rcx, [rbx + 32]
        mov r8, [rbx + 40]
        mov r9, [rbx + 48]
        push rbx
        push rbx                ; for the alignment that functions expect
        call [rbx]
        pop rbx
        pop rbx
        add rbx, 56
        dec qword [abs STATUS]
        jmp .call
done:   mov rax, TABLES
        mov cr3, rax
        jmp next

; Read sector rbx of the disk to rdi; both go on to the next.
sector:
        mov dx, 0x1F7
.busy:  in al, dx
        test al, 0x80
        jnz .busy
        mov dx, 0x1F2
        mov al, 1
        out dx, al
        inc dx                  ; the number's bits, from the lowest
        mov eax, ebx
        out dx, al
        inc dx
        shr eax, 8
        out dx, al
        inc dx
        shr eax, 8
        out dx, al
        inc dx
        shr eax, 8
        and al, 0x0F
        or al, 0xE0             ; of the first disk, by its number
        out dx, al
        inc dx
        mov al, 0x20
        out dx, al
.wait:  in al, dx
        test al, 0x80
        jnz .wait
        test al, 0x08
        jz .wait
        mov dx, 0x1F0
        mov ecx, 256
        rep insw
        inc rbx
        ret

; What kernels call. As any function they keep rbx, rbp and r12 to r15.
memcpy:
        mov rax, rdi
        mov rcx, rdx
        rep movsb
        ret
memset:
        mov r8, rdi
        mov eax, esi
        mov rcx, rdx
        rep stosb
        mov rax, r8
        ret
logf:
        fldln2
        sub rsp, 8
        movss [rsp], xmm0
        fld dword [rsp]
        fyl2x
        fstp dword [rsp]
        movss xmm0, [rsp]
        add rsp, 8
        ret
syscall:                        ; there is no system
        ud2

; Exceptions: those whose number the processor follows by an error code, and the others.
%macro fault 1
fault_%1:
%if %1 == 8 || %1 == 10 || %1 == 11 || %1 == 12 || %1 == 13 || %1 == 14 || %1 == 17 || %1 == 21
%else
        push 0
%endif
        push %1
        jmp failed
        align 16
%endmacro
        align 16
faults:
%assign number 0
%rep 32
        fault number
%assign number number + 1
%endrep

failed:
        pop rax
        mov [abs STATUS + 8], rax
        pop rax
        mov [abs STATUS + 16], rax
        pop rax
        mov [abs STATUS + 24], rax
        mov rax, cr2
        mov [abs STATUS + 32], rax
        jmp done

%define below(label) (label - $$ + ROM)
        align 16
idt:
%assign number 0
%rep 32
        dw below(fault_%+number) & 0xFFFF, 8, 0x8E00, below(fault_%+number) >> 16
        dd 0, 0
%assign number number + 1
%endrep
.place: dw 32 * 16 - 1
        dd idt
gdt:
        dq 0, 0x00AF9A000000FFFF, 0x00CF92000000FFFF
.place: dw 23
        dd gdt

; Where the other side finds them.
        times 0xFF00 - ($ - $$) db 0
        dq memcpy, memset, logf, syscall

        times 0xFFF0 - ($ - $$) db 0
        bits 16
        jmp (ROM >> 4):(start - ROM)
        times 0x10000 - ($ - $$) db 0
