"""Compilations: kernels become machine code in processes of their own, also after their client has left."""
