"""The compiling engine: machine code for the operations of a model, by llvmlite."""
