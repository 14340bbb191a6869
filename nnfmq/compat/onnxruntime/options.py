"""SessionOptions and RunOptions of ONNX Runtime: what has an effect, what is accepted without one, what raises.

Effective: free dimensions, initializers in place of the file's, the path of the optimized model, providers, profiling,
`terminate`, whether a thread that waits polls, and libraries of custom operators. What only changes how ONNX Runtime
computes is passed on to it if the driver hosts the model on it, and has no effect on nnfmq's own engine, because
results do not depend on it (docs/how-to/move-an-onnx-runtime-script.md).
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

from nnfmq.compat.onnxruntime.errors import ort_error
from nnfmq.compat.onnxruntime.initializers import GivenInitializers
from nnfmq.compat.onnxruntime.providers import get_all_providers
from nnfmq.compat.onnxruntime.types import (
    ExecutionMode,
    ExecutionOrder,
    GraphOptimizationLevel,
    OrtExecutionProviderDevicePolicy,
)

if TYPE_CHECKING:
    from nnfmq.compat.onnxruntime.values import OrtValue

__all__ = ["OrtRunOptions", "SessionOptions"]


class _Typed:
    """Attributes that keep the types of their defaults; others do not exist."""

    _defaults: ClassVar[dict[str, Any]]

    def __init_subclass__(cls) -> None:
        cls._defaults = {name: value for name, value in vars(cls).items() if name in cls.__annotations__}

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self._defaults:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        kind = type(self._defaults[name])
        is_integer = kind is int and hasattr(value, "__index__")
        is_truth = kind is bool and (value is None or hasattr(value, "__bool__"))
        if not isinstance(value, kind) and not is_integer and not is_truth:
            raise TypeError(f"{name} is a {kind.__name__}, not a {type(value).__name__}")
        object.__setattr__(self, name, kind(value) if is_integer or is_truth else value)


_KEY_MAX, _VALUE_MAX = 1024, 8192  # ONNX Runtime's


def _require_entry(key: str, value: str) -> None:
    """Raise as ONNX Runtime if a configuration entry is not one."""
    if not isinstance(key, str) or not isinstance(value, str):
        raise TypeError(f"a configuration entry has a str and a str, not {type(key).__name__}, {type(value).__name__}")
    if not key or len(key.encode()) > _KEY_MAX:
        raise RuntimeError(f"Config key is empty or longer than maximum length {_KEY_MAX}")
    if len(value.encode()) > _VALUE_MAX:
        raise RuntimeError(f"Config value is longer than maximum length: {_VALUE_MAX}")


_COMPUTING = (
    "enable_cpu_mem_arena",
    "enable_mem_pattern",
    "enable_mem_reuse",
    "execution_mode",
    "graph_optimization_level",
    "use_deterministic_compute",
)


class SessionOptions(_Typed):
    """The options of a session. One object may serve several sessions."""

    enable_cpu_mem_arena: bool = True
    enable_mem_pattern: bool = True
    enable_mem_reuse: bool = True
    enable_profiling: bool = False
    execution_mode: ExecutionMode = ExecutionMode.ORT_SEQUENTIAL
    execution_order: ExecutionOrder = ExecutionOrder.DEFAULT
    graph_optimization_level: GraphOptimizationLevel = GraphOptimizationLevel.ORT_ENABLE_ALL
    inter_op_num_threads: int = 0
    intra_op_num_threads: int = 0
    log_severity_level: int = -1
    log_verbosity_level: int = 0
    logid: str = ""
    optimized_model_filepath: str = ""
    profile_file_prefix: str = "onnxruntime_profile_"
    use_deterministic_compute: bool = False
    use_per_session_threads: bool = True

    def __init__(self) -> None:
        entries: dict[str, str] = {}
        dimensions: dict[str, int] = {}
        object.__setattr__(self, "_entries", entries)
        libraries: list[str] = []
        object.__setattr__(self, "free_dimensions", dimensions)
        object.__setattr__(self, "free_denotations", dict[str, int]())
        object.__setattr__(self, "given_initializers", GivenInitializers())
        object.__setattr__(self, "given_providers", list[tuple[str, dict[str, str]]]())
        object.__setattr__(self, "custom_op_libraries", libraries)

    _entries: dict[str, str]
    free_dimensions: dict[str, int]
    """The sizes of symbolic dimensions that `add_free_dimension_override_by_name` has fixed."""
    free_denotations: dict[str, int]
    """The sizes of dimensions with a denotation that `add_free_dimension_override_by_denotation` has fixed."""
    given_initializers: GivenInitializers
    """The values that are used in place of those of the file."""
    given_providers: list[tuple[str, dict[str, str]]]
    """The providers of sessions that are made without others."""
    custom_op_libraries: list[str]
    """The paths that `register_custom_ops_library` got."""

    @property
    def config_entries(self) -> Mapping[str, str]:
        """The configuration entries."""
        return self._entries

    @property
    def is_parallel(self) -> bool:
        """Whether ONNX Runtime may execute nodes at the same time."""
        return self.execution_mode is ExecutionMode.ORT_PARALLEL

    @property
    def changed_settings(self) -> dict[str, str | bool]:
        """The options that change how ONNX Runtime computes and are not as by default: names of enumerations, flags."""
        found: dict[str, str | bool] = {}
        for name in _COMPUTING:
            value = getattr(self, name)
            if value != self._defaults[name]:
                found[name] = value.name if isinstance(value, Enum) else value
        return found

    @property
    def polling_window_us(self) -> float | None:
        """The polling window of a session's bursts: 0 if its threads may not spin, otherwise the default."""
        return 0.0 if self._entries.get("session.intra_op.allow_spinning") == "0" else None

    @property
    def external_data_folder(self) -> Path:
        """The folder of the external data of models that are given as bytes."""
        return Path(self._entries.get("session.model_external_initializers_file_folder_path", ""))

    def add_session_config_entry(self, key: str, value: str) -> None:
        """Store a configuration entry. On nnfmq's own engine only "session.intra_op.allow_spinning" has an effect.

        Raises:
            RuntimeError: If the key is empty, or one of them is too long.
        """
        _require_entry(key, value)
        self._entries[key] = value

    def get_session_config_entry(self, key: str) -> str:
        """Return a configuration entry. Raises RuntimeError if there is none."""
        if key not in self._entries:
            raise RuntimeError(f"SessionOptions does not have configuration with key: {key}")
        return self._entries[key]

    def add_free_dimension_override_by_name(self, name: str, size: int) -> None:
        """Fix the size of a symbolic dimension of the model's inputs."""
        self.free_dimensions[name] = operator.index(size)

    def register_custom_ops_library(self, path: str) -> None:
        """Let ONNX Runtime in the driver load a library of custom operators, whose SHA-256 the driver trusts.

        It is read when a session is made that nnfmq's own engine does not execute. Raises Fail if there is no file.
        """
        if not Path(path).is_file():
            raise ort_error("Fail", f"Failed to load library {path}: there is no such file")
        self.custom_op_libraries.append(str(path))

    def has_providers(self) -> bool:
        """Return whether `add_provider` was called."""
        return bool(self.given_providers)

    def add_provider(self, name: str, options: dict[str, str]) -> None:
        """Add a provider, for sessions that are made without any.

        Raises:
            RuntimeError: If ONNX Runtime has no code for it.
        """
        if name not in get_all_providers():
            raise RuntimeError(f"Unknown Provider Type: {name}")
        self.given_providers.append((name, dict(options)))

    def add_provider_for_devices(self, devices: Any, options: dict[str, str]) -> None:
        """Accept devices; without effect."""

    def set_provider_selection_policy(self, policy: OrtExecutionProviderDevicePolicy) -> None:
        """Accept a policy; without effect."""

    def set_provider_selection_policy_delegate(self, delegate: Any) -> None:
        """Accept a function that selects devices; it is never called."""

    def set_load_cancellation_flag(self, cancel: bool) -> None:
        """Accept the flag; without effect."""

    def clear_ep_context_data_read_func(self) -> None:
        """Do nothing: there is no such function."""

    def add_free_dimension_override_by_denotation(self, denotation: str, size: int) -> None:
        """Fix the size of the model's symbolic dimensions that have a denotation, such as "DATA_BATCH"."""
        self.free_denotations[denotation] = operator.index(size)

    def add_initializer(self, name: str, value: OrtValue) -> None:
        """Use a tensor in place of the initializer that the file has under this name; none: without effect.

        Raises:
            RuntimeError: If the name has a tensor already, or this is no OrtValue.
        """
        self.given_initializers.add(name, value)

    def add_external_initializers(self, names: Sequence[str], values: Sequence[OrtValue]) -> None:
        """Use tensors in place of those that the model has in other files. Raises RuntimeError as `add_initializer`."""
        self.given_initializers.add_external(names, values)

    def add_external_initializers_from_files_in_memory(
        self, names: Sequence[str], buffers: Sequence[Any], lengths: Sequence[int]
    ) -> None:
        """Use contents in place of files that have tensors of the model. Raises RuntimeError if some are missing."""
        self.given_initializers.add_files(names, buffers, lengths)

    def set_ep_context_data_read_func(self, read_func: Any, max_data_size: int) -> NoReturn:
        """Raise NotImplemented."""
        raise _refused("set_ep_context_data_read_func", "compiled models of ONNX Runtime cannot be read")


def _refused(name: str, reason: str) -> Exception:
    return ort_error("NotImplemented", f"nnfmq has no {name}: {reason}")


class OrtRunOptions(_Typed):
    """The options of one run. `terminate` ends a run before it starts; the rest has no effect."""

    log_severity_level: int = -1
    log_verbosity_level: int = 0
    logid: str = ""
    only_execute_path_to_fetches: bool = False
    terminate: bool = False

    def __init__(self) -> None:
        entries: dict[str, str] = {}
        object.__setattr__(self, "_entries", entries)

    _entries: dict[str, str]

    def add_run_config_entry(self, key: str, value: str) -> None:
        """Store a configuration entry; without effect. Raises RuntimeError as that of a session."""
        _require_entry(key, value)
        self._entries[key] = value

    def get_run_config_entry(self, key: str) -> str:
        """Return a configuration entry. Raises RuntimeError if there is none."""
        if key not in self._entries:
            raise RuntimeError(f"RunOptions does not have configuration with key: {key}")
        return self._entries[key]

    def add_active_adapter(self, adapter: Any) -> NoReturn:
        """Raise NotImplemented."""
        raise _refused("add_active_adapter", "it does not read LoRA adapters")
