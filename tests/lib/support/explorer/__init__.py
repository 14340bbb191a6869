"""An interleaving explorer for the queue's algorithm: every schedule of a few threads, one memory step at a time.

What runs is `nnfmq.queue._pycore` itself, over memory whose every access stops the program (`bench`). A program that
stopped is a node of its local behaviour, found again by running the call from its start with the answers it has had
so far (`program`). A memory model says what each access may do (`models`); `search` walks all states of all threads and
judges them; `scenarios` says who calls what, `faults` how the Python core can be broken so that the search must notice.
"""
