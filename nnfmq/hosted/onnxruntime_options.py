"""The options of a client for the device `onnxruntime`.

They are those of ONNX Runtime's own interface, as values of JSON: `providers` and `provider_options`; of
`SessionOptions` flags, enumerations by name, and `session_config_entries`. A client must not make the worker open a
file by its path, or load a library: no other entries are taken than those listed here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.hosted import LIBRARIES
from nnfmq.hosted.adapter import OpenOptions
from nnfmq.hosted.options import require_one_of, settings_by_name

__all__ = ["CPU", "LOG_FATAL", "new_session_options", "provider_settings"]

CPU = "CPUExecutionProvider"
LOG_FATAL = 4
"""The severity of the log: errors are raised; ONNX Runtime would also write them to stderr."""
_FLAGS = ("enable_cpu_mem_arena", "enable_mem_pattern", "enable_mem_reuse", "use_deterministic_compute")
_ENUMS = {"graph_optimization_level": "GraphOptimizationLevel", "execution_mode": "ExecutionMode"}
_ENTRIES = "session_config_entries"
_CONFIG_GROUPS = ("mlas.", "optimization.")  # entries about kernels and optimizers; others may name files
_CONFIG_ENTRIES = tuple(f"session.{name}" for name in (
    "allow_released_opsets_only", "disable_aot_function_inlining", "disable_cpu_ep_fallback",
    "disable_double_qdq_remover", "disable_prepacking", "disable_qdq_constant_folding", "disable_quant_qdq",
    "dynamic_block_base", "enable_dq_matmulnbits_fusion", "enable_quant_qdq_cleanup", "function_expansion_byte_limit",
    "function_expansion_node_limit", "graph_optimizations_loop_level", "qdq_matmulnbits_accuracy_level",
    "qdq_matmulnbits_block_size", "qdqisint8allowed", "set_denormal_as_zero", "strict_shape_type_inference",
    "use_device_allocator_for_initializers", "use_env_allocators", "x64quantprecision",
))  # fmt: skip
_PROVIDER_OPTIONS: Mapping[str, tuple[str, ...]] = {
    "CUDAExecutionProvider": (
        "arena_extend_strategy", "cudnn_conv1d_pad_to_nc1d", "cudnn_conv_algo_search", "cudnn_conv_use_max_workspace",
        "device_id", "do_copy_in_default_stream", "enable_skip_layer_norm_strict_mode", "fuse_conv_bias",
        "gpu_mem_limit", "prefer_nhwc", "sdpa_kernel", "use_tf32",
    ),
    "OpenVINOExecutionProvider": ("device_type", "num_of_threads", "num_streams", "precision"),
    "TensorrtExecutionProvider": ("device_id", "trt_bf16_enable", "trt_fp16_enable", "trt_max_workspace_size"),
}  # fmt: skip


def new_session_options(onnxruntime: Any, options: OpenOptions) -> Any:
    """Return the session's options: those of the driver, then those of the client."""
    made = onnxruntime.SessionOptions()
    made.log_severity_level = LOG_FATAL
    made.intra_op_num_threads, made.inter_op_num_threads = options.threads, 1
    made.add_session_config_entry("session.load_model_format", "ONNX")  # whatever the bytes look like
    # A pool spins within a run only. 12 products on 2 threads take 0.34 ms as by default, 0.37 ms without spinning; a
    # run and 20 idle ms after it take 0.7 ms of CPU, 9 ms by default.
    made.add_session_config_entry("session.force_spinning_stop", "1")
    options.require_known("providers", "provider_options", *_ENUMS, *_FLAGS, _ENTRIES, LIBRARIES)
    values: dict[str, Mapping[Any, Any]] = {name: {True: True, False: False} for name in _FLAGS}
    values |= {name: getattr(onnxruntime, kind).__members__ for name, kind in _ENUMS.items()}
    for key in values.keys() & options.options.keys():
        require_one_of(key, options.options[key], values[key])
        setattr(made, key, values[key][options.options[key]])
    for name, entry in settings_by_name(_ENTRIES, options.options.get(_ENTRIES, {})).items():
        if not name.startswith(_CONFIG_GROUPS):
            require_one_of("session config entry", name, _CONFIG_ENTRIES)
        made.add_session_config_entry(name, str(entry))
    if made.execution_mode == onnxruntime.ExecutionMode.ORT_PARALLEL:  # nodes share the threads: two pools would add up
        made.intra_op_num_threads, made.inter_op_num_threads = 1, options.threads
    return made


def provider_settings(onnxruntime: Any, given: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """Return the options of each provider, in the order of their precedence. Raises InvalidArgument."""
    entries, own = given.get("providers") or [CPU], given.get("provider_options") or []
    if not isinstance(entries, list) or not isinstance(own, list) or len(own) not in (0, len(entries)):
        raise InvalidArgument("providers and provider_options are lists of the same length")
    found: dict[str, dict[str, str]] = {}
    for entry, more in zip(entries, own or [{}] * len(entries), strict=True):
        name, setting = entry if isinstance(entry, list) and len(entry) == 2 else (entry, {})
        require_one_of("provider", name, onnxruntime.get_available_providers())
        settings = {**settings_by_name(name, setting), **settings_by_name(name, more)}
        for key in settings:
            require_one_of(f"{name} option", key, _PROVIDER_OPTIONS.get(name, ()))
        found[name] = {key: str(value) for key, value in settings.items()}
    return found
