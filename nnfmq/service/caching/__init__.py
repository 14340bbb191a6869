"""Caches of compiled models.

* `compilation_cache`: the sealed files that a client passes with prepareModel (HAL compilation caching);
  `cache_key` is the key that seals them, `interpreter_cache_format` the content that nnfmq's own devices store.
* `program_cache`: the driver's cache directory, used by all workers of a user.
* `shared_cache_client`, `shared_cache_server`, `shared_cache_protocol`: one copy of a compiled program's constants in
  shared memory for all workers of a supervisor.
"""
