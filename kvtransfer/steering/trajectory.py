"""What a model writes and keeps, step by step, while it reads an edited cache."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import pad

from kvtransfer.geometry.cache import KVCache
from kvtransfer.geometry.hidden import each
from kvtransfer.hf.cache import read
from kvtransfer.hf.model import LanguageModel
from kvtransfer.hf.part import states
from kvtransfer.hf.reader import Reader
from kvtransfer.hf.sample import Sampling, drawable, text_ends
from kvtransfer.steering.axis import NO_AXIS
from kvtransfer.steering.edit import Intervention
from kvtransfer.steering.frame import Opening


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Trajectory:
    """A run of some rows: their tokens, and what the model had of them."""

    ids: Int[Tensor, "b s"]
    """What was written."""
    width: int
    """Columns before the first token that was written."""
    cache: KVCache
    """Of prompt and writing but the last token, as the model made it."""
    read: KVCache
    """What the model read in its place at the last step. Edits here are made column by column, so
    it is what the model read at every step, as far as there was something to read."""
    states: dict[int, Float[Tensor, "b n e"]]
    """What entered some layers at the tokens that were written, but the last."""

    def written(self, layer: int) -> tuple[Float[Tensor, "b h n d"], Float[Tensor, "b h n d"]]:
        """Keys and values that the model read of a layer, at the tokens that were written."""
        keys, values = self.read[layer]
        return keys[:, :, self.width :], values[:, :, self.width :]


def write(
    model: LanguageModel,
    opening: Opening,
    uniforms: Float[Tensor, "b s"],
    *,
    temperature: float,
    edit: Intervention | None = None,
    forced: Int[Tensor, "b s"] | None = None,
    watch: Sequence[int] = (),
    progress: Callable[[], None] = lambda: None,
) -> Trajectory:
    """Write on after ``opening``, a row for each row of ``uniforms``.

    Special tokens are not drawn: every row writes as many tokens as every other, so that all runs
    have the same steps.

    Args:
        model: Writes.
        opening: What it has read.
        uniforms: From 0, below 1: what each row's token is drawn by at each step.
        temperature: Of the drawing.
        edit: From the cache of all tokens before the one that is read to what is read in its place,
            at every step anew.
        forced: Tokens to write instead of drawing any.
        watch: Layers whose input is kept.
        progress: Called after every step.

    Raises:
        UnsupportedModel: its logits are not finite, or its layers cannot be told apart.
        CacheLayoutError: it has no positions for so many tokens, or as :class:`Reader` says.
    """
    rows, steps = uniforms.shape
    prefix = opening.prefix.expand(rows)
    reader = Reader.over(model, prefix, rows=rows, edit=edit)
    sampling, mute = Sampling(temperature=temperature, floor=0.0), text_ends(model)
    step = opening.ids[-1:].expand(rows)[:, None]
    ids: list[Tensor] = []
    seen_states: dict[int, list[Tensor]] = {layer: [] for layer in watch}
    with torch.no_grad(), states(model, watch, otherwise=NO_AXIS) as seen:
        for number in range(steps):
            logits = drawable(model, reader(step, last=True)[:, -1])
            logits[:, mute[mute < logits.shape[1]]] = -torch.inf
            for layer in watch if number else ():
                seen_states[layer].append(seen[layer][:, -1].to("cpu", torch.float32, copy=True))
            if forced is None:
                ids.append(sampling.choose(logits, uniforms[:, number]))
            else:
                ids.append(forced[:, number])
            step = ids[-1][:, None]
            progress()
    positions = torch.arange(prefix.tokens + steps, device=model.device).expand(rows, -1)
    rotations = model.rotary(positions)
    made = read(reader.cache, positions, rotations=rotations, model=model.spec.identity)
    made = replace(made, hidden=each(prefix.hidden, lambda gone: pad(gone, (0, steps))))
    return Trajectory(
        ids=torch.stack(ids, dim=1),
        width=opening.width,
        cache=made,
        read=made if edit is None else edit(made),
        states={layer: torch.stack(each_step, dim=1) for layer, each_step in seen_states.items()},
    )
