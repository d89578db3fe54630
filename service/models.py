"""What the models of a service have in common: their interface, and checks of requests."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from service.engine import Engine, LayerInfo, Segments
from service.errors import ServiceError
from service.oip.codec import Tensor
from service.oip.schema import InferRequest, ModelMetadata

__all__ = [
    "Executed",
    "Model",
    "Result",
    "bad",
    "expect",
    "need_binary",
    "time_limit_s",
    "timings",
    "wanted_outputs",
]


class Result(Protocol):
    """What every answer of the engine says of itself; see ``MoEResult``."""

    queue_s: float
    host_s: float
    kernel_s: float
    step: int
    step_tokens: int

    @property
    def release(self) -> Any:
        """Ends the use of its buffers."""
        ...


class Executed(Protocol):
    """A request that the engine has answered."""

    @property
    def result(self) -> Result:
        """Times, and the memory to release when the answer is out."""
        ...

    @property
    def parameters(self) -> dict[str, Any]:
        """What the answer says beside its tensors and times."""
        ...

    def output(self, name: str) -> Tensor:
        """One output."""
        ...


class Model(Protocol):
    """A model: what it declares, how a request is checked and run.

    Attributes:
        name: in the path.
        version: the one there is.
        outputs: names that may be asked for.
        defaults: those of a request that asks for none.
        binary: outputs that JSON cannot carry.
    """

    name: str
    version: str
    outputs: tuple[str, ...]
    defaults: tuple[str, ...]
    binary: frozenset[str]

    def metadata(self, layer: LayerInfo) -> ModelMetadata:
        """What ``GET /v2/models/NAME`` says."""
        ...

    def parse(
        self,
        request: InferRequest,
        tensors: dict[str, Tensor],
        layer: LayerInfo,
        limit_s: float,
    ) -> Any:
        """Checks a request against the layer.

        Raises:
            ServiceError: 400 naming the tensor, what was given and what is allowed.
        """
        ...

    async def execute(self, engine: Engine, work: Any, layer: LayerInfo) -> Executed:
        """Runs what ``parse`` returned; raises what the engine raises, and ``ServiceError``."""
        ...


def bad(message: str) -> ServiceError:
    """400: the request's own fault."""
    return ServiceError(400, message)


def expect(tensor: Tensor, datatypes: tuple[str, ...], shape: tuple[int, ...]) -> None:
    """Checks a tensor.

    Raises:
        ServiceError: 400, it has another datatype or shape.
    """
    if tensor.datatype not in datatypes:
        raise bad(
            f"input {tensor.name!r} has datatype {tensor.datatype}: "
            f"must be {' or '.join(datatypes)}"
        )
    if tensor.shape != shape:
        raise bad(f"input {tensor.name!r} has shape {list(tensor.shape)}: must be {list(shape)}")


def wanted_outputs(request: InferRequest, model: Model) -> list[tuple[str, bool]]:
    """Names of the outputs asked for, each with whether it goes out as binary.

    Raises:
        ServiceError: 400 for an output that does not exist, or a parameter that is not understood.
    """
    default = request.parameters.get("binary_data_output", False)
    if not isinstance(default, bool):
        raise bad(f"binary_data_output = {default!r}: must be true or false")
    wanted: list[tuple[str, bool]] = [(name, default) for name in model.defaults]
    if request.outputs:
        wanted = []
    for output in request.outputs:
        if output.name not in model.outputs:
            raise bad(
                f"output {output.name!r} does not exist: choose from {', '.join(model.outputs)}"
            )
        if any(name == output.name for name, _ in wanted):
            raise bad(f"output {output.name!r} is asked for twice")
        binary = output.parameters.get("binary_data", default)
        if not isinstance(binary, bool):
            raise bad(f"output {output.name!r}: binary_data = {binary!r}: must be true or false")
        if any(key.startswith("shared_memory") for key in output.parameters):
            raise bad(f"output {output.name!r}: shared memory regions are not supported")
        if output.parameters.get("classification"):
            raise bad(f"output {output.name!r}: classification is not supported")
        wanted.append((output.name, binary))
    return wanted


def need_binary(wanted: list[tuple[str, bool]], model: Model) -> None:
    """Refuses BF16 as JSON before the layer runs, rather than compute and refuse.

    Raises:
        ServiceError: 400 naming the output.
    """
    for name, binary in wanted:
        if name in model.binary and not binary:
            raise bad(
                f"output {name!r}: BF16 cannot be sent as JSON: ask for it with parameters "
                '{"binary_data": true}, or binary_data_output for all'
            )


def time_limit_s(request: InferRequest, default_s: float) -> float:
    """The request's own limit, if it is the shorter one.

    Raises:
        ServiceError: 400, it is no number of microseconds.
    """
    timeout = request.parameters.get("timeout", 0)
    if type(timeout) is not int or timeout < 0:
        raise bad(f"timeout = {timeout!r}: must be a number of microseconds")
    # Whole numbers first: a client's may be too large for a float.
    return min(timeout, int(default_s * 1e6)) / 1e6 if timeout else default_s


def timings(result: Result) -> Tensor:
    """The output ``timings``: queue, host and kernel, seconds."""
    times = np.array([result.queue_s, result.host_s, result.kernel_s], "<f8")
    return Tensor("timings", "FP64", (3,), Segments([times.tobytes()]))
