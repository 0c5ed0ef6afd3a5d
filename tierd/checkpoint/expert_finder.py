"""Finding the experts of a layer: stacked or one by one, plain or in codes, as the names that are there say.

Shapes never decide a layout. What is there in two forms at once is refused.

* plain: the mapping's names.
* fp8: the same names, with `_scale_inv` tensors beside them, one scale per 128 x 128.
* mxfp4, stacked: `_blocks` [E, outputs, inputs / 32, 16] and `_scales` [E, outputs, inputs / 32].
* int4, one by one: `weight_packed` [outputs, inputs / 8], `weight_scale` [outputs, inputs / group], `weight_shape`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tierd.checkpoint.expert_sources import ExpertSource, MatrixSource, Outputs, Span
from tierd.checkpoint.finder import FLOAT_DTYPES, FP8_DTYPE, SCALE_DTYPES
from tierd.checkpoint.quantisation import Coding
from tierd.errors import UnsupportedModel
from tierd.store.shards import tensor_bytes

if TYPE_CHECKING:
    from tierd.checkpoint.finder import Finder
    from tierd.checkpoint.mapping import FamilyMapping, ModelShape, StackedForm
    from tierd.checkpoint.reader import SourceTensor

__all__ = ["ExpertFinder"]

_INT4_SUFFIXES: Final = ("weight_packed", "weight_scale", "weight_shape")
_NIBBLES: Final = 8
"""4-bit codes in an int32."""


class ExpertFinder:
    """Finds experts by name.

    Args:
        finder: of the checkpoint.
        mapping: its family.
        shape: sizes from its config.
    """

    def __init__(self, finder: Finder, mapping: FamilyMapping, shape: ModelShape) -> None:
        self._finder, self._mapping, self._shape = finder, mapping, shape

    def layer(self, layer: int) -> list[ExpertSource] | None:
        """All experts of a layer; None if some tensor is missing, which the finder has noted."""
        count = self._shape.layers[layer]
        singles = [
            tuple(name.format(layer=layer, expert=expert) for name in self._mapping.expert) for expert in range(count)
        ]
        found = [name for names in singles for own in names if (name := self._single_name(own)) is not None]
        stacked = [
            (form, there)
            for form in self._mapping.fused
            for suffix in ("", "_blocks")
            if (there := self._stacked_names(form, layer, suffix))
        ]
        if stacked and found:
            raise self._finder.twice(stacked[0][1][0], found[0])
        if len(stacked) > 1:
            raise self._finder.twice(stacked[0][1][0], stacked[1][1][0])
        if stacked or not singles[0]:
            form, there = stacked[0] if stacked else (self._mapping.fused[0], [""])
            return _Stacked(self._finder, self._shape, form, layer).experts(blocks=there[0].endswith("_blocks"))
        experts = [self._single(names) for names in singles]
        whole = [expert for expert in experts if expert is not None]
        return whole if len(whole) == count else None

    def _single_name(self, name: str) -> str | None:
        """The name under which the weights or codes of one matrix are there."""
        packed = f"{name.removesuffix('weight')}{_INT4_SUFFIXES[0]}"
        there = [known for known in (name, packed) if self._finder.has(known)]
        if len(there) > 1:
            raise self._finder.twice(*there)
        return there[0] if there else None

    def _stacked_names(self, form: StackedForm, layer: int, suffix: str) -> list[str]:
        names = (f"{name.format(layer=layer)}{suffix}" for name in (form.gate_up, form.down))
        return [name for name in names if self._finder.has(name)]

    def _single(self, names: tuple[str, ...]) -> ExpertSource | None:
        hidden, width = self._shape.hidden_size, self._shape.intermediate_size
        sizes = ((width, hidden), (width, hidden), (hidden, width))
        matrices = [self._matrix(name, *size) for name, size in zip(names, sizes, strict=True)]
        gate, up, down = matrices
        return None if gate is None or up is None or down is None else ExpertSource(gate, up, down)

    def _matrix(self, name: str, rows: int, cols: int) -> MatrixSource | None:
        """One matrix that has tensors of its own."""
        finder = self._finder
        there = self._single_name(name)
        if there is None:
            finder.lack([name])
            return None
        if there != name:
            return self._int4(name.removesuffix("weight"), rows, cols)
        if not finder.is_fp8(name):
            return MatrixSource(rows, cols, _whole(finder.take(name, (rows, cols))), Outputs(rows))
        codes, scales = finder.take(name, (rows, cols), (FP8_DTYPE,)), finder.take_fp8_scales(name, rows, cols)
        if scales is None:
            return None
        group = finder.quantisation.group_size
        return MatrixSource(rows, cols, _whole(codes), Outputs(rows), Coding.FP8, _whole(scales), group)

    def _int4(self, prefix: str, rows: int, cols: int) -> MatrixSource | None:
        finder = self._finder
        packed, scale, shape = (f"{prefix}{suffix}" for suffix in _INT4_SUFFIXES)
        finder.expect(Coding.INT4, packed)
        if finder.lack((scale, shape)):
            return None
        group = finder.quantisation.group_size
        codes = finder.take(packed, (rows, -(-cols // _NIBBLES)), ("I32",))
        scales = finder.take(scale, (rows, -(-cols // group)), ("BF16",))
        finder.take(shape, (2,), ("I64", "I32"))
        return MatrixSource(rows, cols, _whole(codes), Outputs(rows), Coding.INT4, _whole(scales), group)


_Tensors = tuple["SourceTensor", "SourceTensor | None", Coding]
"""Weights or codes of all experts, their scales, and which of these they are."""


class _Stacked:
    """The experts of a layer in one stacked form."""

    def __init__(self, finder: Finder, shape: ModelShape, form: StackedForm, layer: int) -> None:
        self._finder, self._form = finder, form
        self._names = (form.gate_up.format(layer=layer), form.down.format(layer=layer))
        self._biases = tuple(name.format(layer=layer) for name in form.biases or ())
        self._hidden, self._width, self._count = shape.hidden_size, shape.intermediate_size, shape.layers[layer]

    def experts(self, *, blocks: bool) -> list[ExpertSource] | None:
        """All of them; None if a tensor is missing, which the finder has noted."""
        finder, names = self._finder, self._names
        wanted = [f"{name}{suffix}" for name in names for suffix in ("_blocks", "_scales")] if blocks else list(names)
        if finder.lack((*wanted, *self._biases)):
            return None
        tall, low = (2 * self._width, self._hidden), (self._hidden, self._width)
        read = self._plain
        if blocks:
            read = self._float4
        elif any(finder.is_fp8(name) for name in names):
            read = self._float8
        whole = [
            found for name, size in zip(names, (tall, low), strict=True) if (found := read(name, *size)) is not None
        ]
        if len(whole) < len(names):
            return None
        transposed = self._form.transposed and not blocks
        biases = self._bias_spans()
        return [self._expert(expert, whole, biases, transposed=transposed) for expert in range(self._count)]

    def _expert(
        self,
        expert: int,
        whole: list[_Tensors],
        biases: list[list[Span]],
        *,
        transposed: bool,
    ) -> ExpertSource:
        halves = self._outputs(transposed=transposed)
        (gate, up), down = halves, Outputs(self._hidden, transposed=transposed)
        sizes = ((0, gate, self._width, self._hidden), (0, up, self._width, self._hidden))
        matrices = []
        for place, outputs, rows, cols in (*sizes, (1, down, self._hidden, self._width)):
            tensor, scales, coding = whole[place]
            matrices.append(
                MatrixSource(
                    rows,
                    cols,
                    _part(tensor, expert, self._count),
                    outputs,
                    coding,
                    None if scales is None else _part(scales, expert, self._count),
                    self._finder.quantisation.group_size,
                    biases[place][expert] if biases else None,
                )
            )
        return ExpertSource(*matrices)

    def _outputs(self, *, transposed: bool) -> tuple[Outputs, Outputs]:
        """Which outputs of the common block are the gate's, and which the up's."""
        total = 2 * self._width
        if self._form.interleaved:
            return Outputs(total, 0, 2, transposed), Outputs(total, 1, 2, transposed)
        return Outputs(total, 0, 1, transposed), Outputs(total, self._width, 1, transposed)

    def _plain(self, name: str, outputs: int, inputs: int) -> _Tensors | None:
        order = (inputs, outputs) if self._form.transposed else (outputs, inputs)
        return self._finder.take(name, (self._count, *order), FLOAT_DTYPES), None, Coding.PLAIN

    def _float8(self, name: str, outputs: int, inputs: int) -> _Tensors | None:
        finder, block = self._finder, self._finder.quantisation.group_size
        if self._form.interleaved or self._form.transposed or self._width % block:
            raise UnsupportedModel(
                f"tensor {name}: fp8 scales of {block} x {block} would span gate and up",
                hint="Which rows a scale belongs to is not guessed; use a release with experts one by one.",
            )
        if finder.lack([f"{name}_scale_inv"]):
            return None
        codes = finder.take(name, (self._count, outputs, inputs), (FP8_DTYPE,))
        grid = (self._count, -(-outputs // block), -(-inputs // block))
        return codes, finder.take(f"{name}_scale_inv", grid, SCALE_DTYPES), Coding.FP8

    def _float4(self, name: str, outputs: int, inputs: int) -> _Tensors | None:
        finder = self._finder
        finder.expect(Coding.MXFP4, f"{name}_blocks")
        group = finder.quantisation.group_size
        if inputs % group:
            raise UnsupportedModel(f"tensor {name}_blocks: {inputs} columns are not whole groups of {group}")
        codes = finder.take(f"{name}_blocks", (self._count, outputs, inputs // group, group // 2), ("U8",))
        scales = finder.take(f"{name}_scales", (self._count, outputs, inputs // group), ("U8", "F8_E8M0"))
        return codes, scales, Coding.MXFP4

    def _bias_spans(self) -> list[list[Span]]:
        """Of gate and up together, and of down: a span for each expert; empty without biases."""
        sizes = (2 * self._width, self._hidden)
        tensors = [
            self._finder.take(name, (self._count, size)) for name, size in zip(self._biases, sizes, strict=False)
        ]
        return [[_part(tensor, expert, self._count) for expert in range(self._count)] for tensor in tensors]


def _whole(tensor: SourceTensor) -> Span:
    return Span(tensor, tensor.offset, tensor.nbytes)


def _part(tensor: SourceTensor, expert: int, count: int) -> Span:
    """One expert's share of a stacked tensor."""
    size = tensor_bytes(tensor.dtype, tensor.shape) // count
    return Span(tensor, tensor.offset + size * expert, size)
