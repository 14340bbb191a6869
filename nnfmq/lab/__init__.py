"""The laboratory: what measures and tests everything else, and what the commands of that kind are made of.

Latency under load (`bench`), worst cases and their causes (`stress`), the acceptance of a machine (`suite`), Android's
test models and random graphs (`conformance`), its Machine Learning Test Suite (`mlts`), replays of recordings, and
HIDL's methods for tests of drivers. Only commands and tools import it; nothing of it is imported by `nnfmq.connect()`.
"""
