"""What executes a prepared model: the interpreter, which is the reference, and compiling engines beside it."""
