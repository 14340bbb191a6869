"""The engines that execute a prepared model: the interpreter, which is the reference, and compiling ones beside it."""
