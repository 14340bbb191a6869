"""The system calls that a process in a sandbox may use, each group with its reason.

It is a list of what is allowed: a call that a later kernel adds is refused until somebody has looked at it. A call is

* allowed, whatever its arguments are (`ALLOWED`),
* allowed if its arguments fulfil conditions (`conditions`), otherwise it fails with EPERM,
* the end of the process (`KILLED`): no library tries it on the way to something else,
* unknown to the process (`UNKNOWN`, and all calls newer than `NEWEST`): ENOSYS, so that a library falls back,
* or it fails with EPERM: all others, such as socket(2), connect(2), execve(2), fork(2) and kill(2). Libraries try some
  of them, and go on.

Numbers are those of Linux: arch/x86/entry/syscalls/syscall_64.tbl, and include/uapi/asm-generic/unistd.h for AArch64.
"""

from __future__ import annotations

import fcntl
import os
import termios
from collections.abc import Iterator, Mapping
from typing import NamedTuple, TypeAlias

__all__ = [
    "ALLOWED",
    "ALWAYS",
    "KILLED",
    "NEWEST",
    "OWN_PID",
    "UNKNOWN",
    "Condition",
    "Permissions",
    "Rule",
    "conditions",
    "numbers",
]

NEWEST = 450  # set_mempolicy_home_node(2): the last number that these tables have been compared with

Group: TypeAlias = tuple[str, str]
"""A reason, and the calls that it holds for, as name:x86-64:AArch64; `-` where a machine lacks the call."""

ALLOWED: tuple[Group, ...] = (
    (
        "Descriptors that are open already.",
        "read:0:63 write:1:64 readv:19:65 writev:20:66 pread64:17:67 pwrite64:18:68 preadv:295:69 pwritev:296:70 "
        "preadv2:327:286 pwritev2:328:287 lseek:8:62 close:3:57 close_range:436:436 dup:32:23 dup2:33:- dup3:292:24 "
        "fstat:5:80 fallocate:285:47 ftruncate:77:46 fsync:74:82 fdatasync:75:83 fadvise64:221:223 flock:73:32 "
        "sendfile:40:71 copy_file_range:326:285 getdents64:217:61 getdents:78:- fstatfs:138:44",
    ),
    (
        "Paths: Landlock decides what may be opened. What a path names can be asked in any case.",
        "open:2:- openat:257:56 newfstatat:262:79 stat:4:- lstat:6:- statx:332:291 access:21:- faccessat:269:48 "
        "faccessat2:439:439 readlink:89:- readlinkat:267:78 getcwd:79:17 statfs:137:43",
    ),
    (
        "New descriptors that nothing outside of the process knows.",
        "pipe:22:- pipe2:293:59 eventfd2:290:19 memfd_create:319:279 epoll_create1:291:20 timerfd_create:283:85",
    ),
    (
        "Waiting for descriptors.",
        "epoll_ctl:233:21 epoll_wait:232:- epoll_pwait:281:22 epoll_pwait2:441:441 poll:7:- ppoll:271:73 select:23:- "
        "pselect6:270:72 timerfd_settime:286:86 timerfd_gettime:287:87",
    ),
    (
        "Connections that are open already. A connected socket ignores an address.",
        "sendmsg:46:211 recvmsg:47:212 recvfrom:45:207 sendmmsg:307:269 recvmmsg:299:243 shutdown:48:210 "
        "getsockname:51:204 getpeername:52:205 getsockopt:55:209 setsockopt:54:208",
    ),
    (
        # Not mremap(2): it enlarges the mapping of one page of a file over the next ones, also if these are sealed
        # against new writable mappings. realloc(3) then copies.
        "Memory of this process, whose protection is not changed.",
        "munmap:11:215 madvise:28:233 brk:12:214 msync:26:227 mincore:27:232 membarrier:324:283 "
        "mlock:149:228 munlock:150:229 get_mempolicy:239:236",
    ),
    (
        "Threads of this process.",
        "futex:202:98 futex_waitv:449:449 set_robust_list:273:99 set_tid_address:218:96 rseq:334:293 gettid:186:178 "
        "sched_yield:24:124 sched_getaffinity:204:123 sched_getparam:143:121 sched_getscheduler:145:120 "
        "sched_get_priority_max:146:125 sched_get_priority_min:147:126 getcpu:309:168 getpriority:140:141 exit:60:93 "
        "exit_group:231:94 arch_prctl:158:-",
    ),
    (
        "Signals that this process receives, and its own timers.",
        "rt_sigaction:13:134 rt_sigprocmask:14:135 rt_sigreturn:15:139 rt_sigpending:127:136 rt_sigtimedwait:128:137 "
        "rt_sigsuspend:130:133 pause:34:- sigaltstack:131:132 setitimer:38:103 getitimer:36:102 "
        "timer_create:222:107 timer_settime:223:110 timer_gettime:224:108 timer_delete:226:111 "
        "timer_getoverrun:225:109 restart_syscall:219:128",
    ),
    (
        "The time, random numbers, and what the process is.",
        "clock_gettime:228:113 gettimeofday:96:169 time:201:- clock_getres:229:114 clock_nanosleep:230:115 "
        "nanosleep:35:101 times:100:153 getrandom:318:278 getpid:39:172 getppid:110:173 getuid:102:174 geteuid:107:175 "
        "getgid:104:176 getegid:108:177 getresuid:118:148 getresgid:120:150 getgroups:115:158 getpgrp:111:- "
        "getpgid:121:155 getsid:124:156 capget:125:90 uname:63:160 sysinfo:99:179 getrusage:98:165 getrlimit:97:163 "
        "setrlimit:160:164",
    ),
)

_WRITING: Group = (
    "Names in folders that Landlock lets the process write to.",
    "mkdir:83:- mkdirat:258:34 unlink:87:- unlinkat:263:35 rmdir:84:- rename:82:- renameat:264:38 renameat2:316:276 "
    "link:86:- linkat:265:37 truncate:76:45 umask:95:166",
)

_CONNECTING: Group = (
    "The client of a driver, at a path. Landlock keeps it from abstract addresses and ports.",
    "connect:42:203",
)

KILLED: tuple[Group, ...] = (
    (
        "Memory, descriptors and registers of other processes.",
        "ptrace:101:117 process_vm_readv:310:270 process_vm_writev:311:271 kcmp:312:272 pidfd_getfd:438:438",
    ),
    (
        "Namespaces and mounts.",
        "mount:165:40 umount2:166:39 move_mount:429:429 open_tree:428:428 fsopen:430:430 fsconfig:431:431 "
        "fsmount:432:432 fspick:433:433 mount_setattr:442:442 pivot_root:155:41 chroot:161:51 setns:308:268 "
        "unshare:272:97",
    ),
    (
        "Parts of the kernel with a large surface, none of which an execution needs.",
        "bpf:321:280 userfaultfd:323:282 io_uring_setup:425:425 io_uring_enter:426:426 io_uring_register:427:427 "
        "perf_event_open:298:241 add_key:248:217 request_key:249:218 keyctl:250:219 open_by_handle_at:304:265 "
        "fanotify_init:300:262",
    ),
    (
        "The machine as a whole.",
        "init_module:175:105 finit_module:313:273 delete_module:176:106 kexec_load:246:104 kexec_file_load:320:294 "
        "reboot:169:142 swapon:167:224 swapoff:168:225 acct:163:89 quotactl:179:60 quotactl_fd:443:443 "
        "settimeofday:164:170 clock_settime:227:112 clock_adjtime:305:266 adjtimex:159:171 sethostname:170:161 "
        "setdomainname:171:162 iopl:172:- ioperm:173:- modify_ldt:154:- syslog:103:116",
    ),
)

UNKNOWN: Group = (
    "Its flags are in memory, which a filter cannot read: the C library then uses clone(2).",
    "clone3:435:435",
)

_CONDITIONAL = (
    "clone:56:220 mmap:9:222 mprotect:10:226 pkey_mprotect:329:288 fcntl:72:25 ioctl:16:29 socket:41:198 "
    "socketpair:53:199 sendto:44:206 kill:62:129 tgkill:234:131 prctl:157:167 prlimit64:302:261 utimensat:280:88 "
    "setpriority:141:140 sched_setaffinity:203:122"
)


class Condition(NamedTuple):
    """A condition of an argument: its lower 32 bits (upper if `is_high`), masked, are one of `values`, or none."""

    argument: int
    values: tuple[int, ...]
    mask: int = 0xFFFFFFFF
    is_one: bool = True
    is_high: bool = False


OWN_PID = 0x7FFF_A5A5  # above the largest pid
"""Stands for the process's own pid in `Condition.values`."""
Rule: TypeAlias = tuple[tuple[Condition, ...], ...]
"""Alternatives; a call is allowed if all conditions of one of them hold."""
ALWAYS: Rule = ((),)


class Permissions(NamedTuple):
    """The rights of a process beside computing with what it has.

    Attributes:
        generates_code: It may make memory executable.
        writes: There are folders that it may write to.
        connects: It may connect to unix sockets at paths.
        controls_nodes: It may send any ioctl(2) to a device node, as the libraries of GPUs do, but type in no terminal.
    """

    generates_code: bool = False
    writes: bool = False
    connects: bool = False
    controls_nodes: bool = False


def conditions(permissions: Permissions) -> Mapping[str, Rule]:
    """Return the conditions of calls that are allowed for some arguments only, by name."""
    rules = _fixed_conditions()
    if permissions.generates_code:
        rules |= dict.fromkeys(("mmap", "mprotect", "pkey_mprotect"), ALWAYS)
    if permissions.controls_nodes:
        rules["ioctl"] = ((Condition(1, _IOCTL_TYPING, is_one=False),),)
    if permissions.connects:
        # SOCK_DGRAM could send to an abstract address without connect(2).
        rules["socket"] = ((Condition(0, (_AF_UNIX,)), _STREAM_OR_PACKETS),)
    return rules


# Of <sys/mman.h> and <sys/socket.h>; the modules that have them are for those that map and connect.
_PROT_WRITE, _PROT_EXEC, _MAP_ANONYMOUS = 2, 4, 0x20
_AF_UNIX, _SOCK_STREAM, _SOCK_SEQPACKET = 1, 1, 5
_CLONE_THREAD = 0x10000
_CLONE_NEW = 0x7E020000  # CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID and NEWNET
_SOCKET_TYPE = 0xF  # the rest are flags
_STREAM_OR_PACKETS = Condition(1, (_SOCK_STREAM, _SOCK_SEQPACKET), _SOCKET_TYPE)
_NOT_EXECUTABLE = (Condition(2, (0,), _PROT_EXEC),)
_F_SETOWN_EX = 15
_FCNTL_REJECTED = (fcntl.F_SETOWN, fcntl.F_SETSIG, _F_SETOWN_EX, fcntl.F_SETLEASE, fcntl.F_NOTIFY)
_IOCTL_ALLOWED = (
    termios.TCGETS,
    termios.TIOCGWINSZ,
    termios.FIONREAD,
    termios.FIONBIO,
    termios.FIOCLEX,
    termios.FIONCLEX,
)
_IOCTL_TYPING = (termios.TIOCSTI, termios.TIOCLINUX)
_PR_SET_VMA = 0x53564D41
_PRCTL_ALLOWED = (
    3,  # PR_GET_DUMPABLE
    15,  # PR_SET_NAME
    16,  # PR_GET_NAME
    21,  # PR_GET_SECCOMP
    23,  # PR_CAPBSET_READ
    29,  # PR_SET_TIMERSLACK
    30,  # PR_GET_TIMERSLACK
    39,  # PR_GET_NO_NEW_PRIVS
    41,  # PR_SET_THP_DISABLE
    42,  # PR_GET_THP_DISABLE
    _PR_SET_VMA,  # a name for memory
)


def _fixed_conditions() -> dict[str, Rule]:
    return {
        # A thread of this process, in its namespaces.
        "clone": ((Condition(0, (_CLONE_THREAD,), _CLONE_THREAD | _CLONE_NEW),),),
        # What becomes executable is a file's, is mapped as it is, and was never writable here: libraries, and linked
        # object code (`engines.compiled.object_code`).
        "mmap": (
            _NOT_EXECUTABLE,
            (Condition(2, (_PROT_EXEC,), _PROT_EXEC | _PROT_WRITE), Condition(3, (0,), _MAP_ANONYMOUS)),
        ),
        "mprotect": (_NOT_EXECUTABLE,),
        "pkey_mprotect": (_NOT_EXECUTABLE,),
        # A descriptor's owner gets a signal when it is readable, which would be a way to signal another process. With
        # O_ASYNC that of a terminal is the group of processes in its foreground.
        "fcntl": (
            (Condition(1, (*_FCNTL_REJECTED, fcntl.F_SETFL), is_one=False),),
            (Condition(1, (fcntl.F_SETFL,)), Condition(2, (0,), os.O_ASYNC)),
        ),
        # What the standard library asks of any file. Of a terminal it could otherwise type commands (TIOCSTI).
        "ioctl": ((Condition(1, _IOCTL_ALLOWED),),),
        # Both ends are this process's, and the type ignores addresses: the connections to compile processes.
        "socketpair": ((Condition(0, (_AF_UNIX,)), _STREAM_OR_PACKETS),),
        "sendto": ((Condition(4, (0,)), Condition(4, (0,), is_high=True)),),  # without an address
        "prctl": ((Condition(0, _PRCTL_ALLOWED),),),
        "prlimit64": ((Condition(0, (0,)),),),  # of this process
        "utimensat": ((Condition(1, (0,)), Condition(1, (0,), is_high=True)),),  # of an open file, not of a path
        # To this process, as abort(3) sends one.
        "kill": ((Condition(0, (OWN_PID,)),),),
        "tgkill": ((Condition(0, (OWN_PID,)),),),
        "setpriority": ((Condition(0, (os.PRIO_PROCESS,)), Condition(1, (0,))),),  # of this thread
        "sched_setaffinity": ((Condition(0, (0,)),),),  # of this thread
    }


def numbers(machine: str, *groups: Group) -> dict[str, int]:
    """Return the numbers of the calls of `groups` on a machine, as `uname -m` names it, by name."""
    column = {"x86_64": 1, "aarch64": 2}[machine]
    return dict(_parsed(column, *(calls for _, calls in groups)))


def _parsed(column: int, *texts: str) -> Iterator[tuple[str, int]]:
    for word in " ".join(texts).split():
        fields = word.split(":")
        if fields[column] != "-":
            yield fields[0], int(fields[column])


def allowed_groups(permissions: Permissions) -> tuple[Group, ...]:
    """Return the calls that are allowed whatever their arguments are."""
    added = [group for group, has in ((_WRITING, permissions.writes), (_CONNECTING, permissions.connects)) if has]
    return (*ALLOWED, *added)


CONDITIONAL: Group = ("Only for some arguments; see `conditions`.", _CONDITIONAL)
