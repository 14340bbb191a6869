"""The compiling engine: machine code for the operations of a model, generated with LLVM."""
