"""ExecutionSetup: the arguments and options of an execution, which are set before it is computed."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from nnfmq.hal.errors import BadState, InvalidArgument
from nnfmq.hal.tensor_info import TensorInfo
from nnfmq.hal.types import ExecutionConfig
from nnfmq.nnapi.argument_settings import (
    ApplicationBuffer,
    ArgumentSetting,
    array_setting,
    device_setting,
    memory_setting,
)
from nnfmq.nnapi.compilation_builder import CompilationBuilder
from nnfmq.nnapi.device_memory import DeviceMemory
from nnfmq.nnapi.execution_progress import ExecutionProgress
from nnfmq.nnapi.extension_attributes import ExtensionAttributes
from nnfmq.nnapi.required_arguments import check_index, required
from nnfmq.nnapi.shared_model import SharedModel
from nnfmq.runtime.managed_buffer import AnyMemory
from nnfmq.runtime.wire_values import make_execution_config
from nnfmq.uncopyable import Uncopyable

__all__ = ["ExecutionSetup"]


class ExecutionSetup(Uncopyable):
    """The setters of `ExecutionBuilder`. Each raises BadState once a computation was started."""

    def __init__(self, compilation: CompilationBuilder) -> None:
        self._compilation = required(compilation, "the compilation")
        self._shared: SharedModel = compilation.require_compiled("an execution")
        self._progress = ExecutionProgress()
        self._inputs: list[ArgumentSetting | None] = [None] * len(self._shared.inputs)
        self._outputs: list[ArgumentSetting | None] = [None] * len(self._shared.outputs)
        self._allows_padding = False
        self._is_measured = False
        self._timeout: float | None = None
        self._loop_timeout: float | None = None
        self._attributes = ExtensionAttributes()

    # ------------------------------------------------------------------------------------------------ arguments

    def set_input(self, index: int, buffer: ApplicationBuffer | None, dimensions: Sequence[int] | None = None) -> None:
        """Use the application's array or bytes as an input; None omits it. Each computation copies them.

        Args:
            index: The input.
            buffer: A contiguous array of the input's element type, or bytes. Only its size counts, not its shape.
            dimensions: The dimensions, if the model leaves some unknown. (Nothing else of NNAPI's operand type counts.)

        Raises:
            BadState: If the input was set before, or a computation was started.
            InvalidArgument: If there is no such input, or `buffer` or `dimensions` do not fit it.
        """
        info = self._argument("set_input", self._inputs, index)
        self._inputs[index] = array_setting(info, buffer, dimensions, is_output=False, padded=self._allows_padding)

    def set_output(self, index: int, buffer: ApplicationBuffer | None, dimensions: Sequence[int] | None = None) -> None:
        """Use the application's array or bytes as an output; None omits it. Otherwise as `set_input`.

        It is filled when the computation has succeeded; for an asynchronous one, when its event has been waited for.
        """
        info = self._argument("set_output", self._outputs, index)
        self._outputs[index] = array_setting(info, buffer, dimensions, is_output=True, padded=self._allows_padding)

    def set_input_from_memory(
        self,
        index: int,
        memory: AnyMemory | DeviceMemory,
        offset: int = 0,
        length: int = 0,
        dimensions: Sequence[int] | None = None,
    ) -> None:
        """Use `length` bytes of a memory from `offset` on as an input, or a whole device memory. Borrows the memory.

        The driver reads the memory itself. A memory must not be closed before the computation is started.

        Raises:
            BadState: If the input was set before, or a computation was started.
            InvalidArgument: If there is no such input, the part is not inside the memory or does not fit the input, or
                a device memory was not described for it, or is not used whole.
        """
        info = self._argument("set_input_from_memory", self._inputs, index)
        self._inputs[index] = self._in_memory(info, memory, (offset, length), dimensions, (index, False))

    def set_output_from_memory(
        self,
        index: int,
        memory: AnyMemory | DeviceMemory,
        offset: int = 0,
        length: int = 0,
        dimensions: Sequence[int] | None = None,
    ) -> None:
        """Use `length` bytes of a memory from `offset` on as an output, or a whole device memory. As for inputs."""
        info = self._argument("set_output_from_memory", self._outputs, index)
        self._outputs[index] = self._in_memory(info, memory, (offset, length), dimensions, (index, True))

    def _argument(self, function: str, settings: Sequence[ArgumentSetting | None], index: int) -> TensorInfo:
        """Return the description of an argument that may be set now."""
        self._progress.require_preparation(function)
        is_output = settings is self._outputs
        infos = self._shared.outputs if is_output else self._shared.inputs
        kind = "output" if is_output else "input"
        check_index(index, infos, kind)
        if settings[index] is not None:
            raise BadState(f"{function}: {kind} {index} was set before")
        return infos[index]

    def _in_memory(
        self,
        info: TensorInfo,
        memory: AnyMemory | DeviceMemory,
        span: tuple[int, int],
        dimensions: Sequence[int] | None,
        role: tuple[int, bool],
    ) -> ArgumentSetting:
        required(memory, "the memory")
        if isinstance(memory, DeviceMemory):
            memory.require_role((self._shared, *role))
            return device_setting(info, memory, span, dimensions)
        is_output = role[1]
        return memory_setting(info, memory, span, dimensions, is_output=is_output, padded=self._allows_padding)

    def enable_input_and_output_padding(self, enable: bool) -> None:
        """Let arguments have more bytes than their data: padding, which a driver may read, and never writes.

        Raises:
            BadState: If an argument was set, or a computation was started.
        """
        self._progress.require_preparation("enable_input_and_output_padding")
        if any(setting is not None for setting in (*self._inputs, *self._outputs)):
            raise BadState("enable_input_and_output_padding: an argument was set before; call this first")
        self._allows_padding = enable

    # ------------------------------------------------------------------------------------------------ options

    def set_timeout(self, timeout: float | None) -> None:
        """Limit each computation, in seconds; None = no limit.

        Raises:
            InvalidArgument: If the compilation is not for exactly one device, or `timeout` is negative.
            BadState: If a computation was started.
        """
        self._compilation.require_one_device("a timeout")
        self._progress.require_preparation("set_timeout")
        if timeout is not None and not timeout >= 0:  # written so that NaN is rejected as well
            raise InvalidArgument(f"a timeout is 0 or more seconds, or None for no limit; got {timeout}")
        self._timeout = timeout

    def set_loop_timeout(self, timeout: float | None) -> None:
        """Limit each WHILE loop, in seconds; None = the default. More than the maximum is reduced to it.

        Raises:
            BadState: If a computation was started.
            InvalidArgument: If `timeout` is negative.
        """
        self._progress.require_preparation("set_loop_timeout")
        make_execution_config(False, timeout)  # checks it
        self._loop_timeout = timeout

    def set_measure_timing(self, measure: bool) -> None:
        """Measure the durations of the computation, for `get_duration`.

        Raises:
            InvalidArgument: If the compilation is not for exactly one device.
            BadState: If a computation was started.
        """
        self._compilation.require_one_device("measuring times")
        self._progress.require_preparation("set_measure_timing")
        self._is_measured = measure

    def set_reusable(self, reusable: bool) -> None:
        """Allow any number of computations, one at a time.

        Raises:
            BadState: If a computation was started.
        """
        self._progress.require_preparation("set_reusable")
        self._progress.is_reusable = reusable

    def add_extension_attribute(self, extension_name: str, code: int, value: bytes) -> None:
        """Add a vendor's hint for the computations; the device ignores attributes that it does not know.

        Raises:
            InvalidArgument: If the compilation is not for exactly one device, which supports the extension.
            BadState: If a computation was started.
        """
        self._compilation.check_extension(extension_name)
        self._progress.require_preparation("add_extension_attribute")
        self._attributes.add(extension_name, code, value)

    # ------------------------------------------------------------------------------------------------ for computations

    def _settings(self, function: str) -> tuple[list[ArgumentSetting], list[ArgumentSetting]]:
        """Return the settings of all inputs and outputs. Raises InvalidArgument if one is missing."""
        found = []
        for kind, settings in (("input", self._inputs), ("output", self._outputs)):
            missing = [str(index) for index, setting in enumerate(settings) if setting is None]
            if missing:
                raise InvalidArgument(f"{function}: {kind} {', '.join(missing)} was not set")
            found.append([setting for setting in settings if setting is not None])
        return found[0], found[1]

    def _config(self) -> ExecutionConfig:
        config = make_execution_config(self._is_measured, self._loop_timeout)
        return replace(config, hints=self._attributes.hints, extensions=self._attributes.extensions)
