"""Reads tokens one stretch after another on top of a prefix, which stays as it is."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import DynamicCache

from kvtransfer.errors import CacheLayoutError
from kvtransfer.geometry.cache import KVCache
from kvtransfer.hf.cache import read, write
from kvtransfer.hf.call import call
from kvtransfer.hf.edited import Edit, effective
from kvtransfer.hf.fits import check_fits, check_room, check_tables
from kvtransfer.hf.model import LanguageModel
from kvtransfer.hf.rows import check_columns, check_gaps, check_one_table, next_positions, span


@dataclass(slots=True)
class Reader:
    """Reads tokens one stretch after another, on top of a prefix."""

    model: LanguageModel
    prefix: KVCache | None
    cache: DynamicCache
    seen: Int[Tensor, "b t"]
    """Which columns of the cache are tokens."""
    next: Int[Tensor, " b"]
    """The position of each row's next token."""
    at: Int[Tensor, "b t"]
    """The position of each column of the cache."""
    edit: Edit | None = None

    @classmethod
    def over(
        cls,
        model: LanguageModel,
        prefix: KVCache | None,
        *,
        rows: int = 1,
        edit: Edit | None = None,
    ) -> "Reader":
        """One that has read ``prefix``, which stays as it is, and goes on with ``rows`` sequences.

        Args:
            model: Reads.
            prefix: What it has read.
            rows: Sequences, where there is no prefix.
            edit: At every step the model reads ``edit(all that was cached)``. What it reads is
                not kept: the next step's edit begins with what the model itself made, so that
                edits do not add up.

        Raises:
            CacheLayoutError, IncompatibleModels: it cannot be read by ``model``.
        """
        if prefix is not None:
            check_fits(model, prefix)
        cache = DynamicCache() if prefix is None else write(prefix, masked=True)
        seen = torch.ones(rows, 0, dtype=torch.long) if prefix is None else prefix.mask
        at = seen if prefix is None else prefix.positions
        starts = next_positions(prefix, rows)
        on = model.device
        return cls(model, prefix, cache, seen.to(on), starts.to(on), at.to(on), edit)

    def __call__(
        self,
        ids: Int[Tensor, "b s"],
        live: Int[Tensor, "b s"] | None = None,
        *,
        last: bool = False,
    ) -> Float[Tensor, "b _s v"]:
        """The logits after each of ``ids``, or after the last of them alone.

        Args:
            ids: What comes next.
            live: Which of them are tokens, the others being padding; None for all.
            last: Whether only the last logits are wanted.

        Raises:
            CacheLayoutError: there are none of them, or more than the model has positions for, or
                its table changes at that length.
        """
        model = self.model
        if ids.shape[1] == 0:
            raise CacheLayoutError(
                "there are no live tokens after the prefix, and a cache holds no logits",
                hint="keep the last prompt token out of the prefix",
            )
        ids = ids.to(model.device)
        live = torch.ones_like(ids) if live is None else live.to(ids)
        ends = self.next + live.sum(dim=1)
        start, end = span(self.next, ends)
        check_room(model, end)
        check_tables(model, self.prefix, start, end)
        check_one_table(model, ends)
        if self.prefix is not None:
            check_gaps(model, self.prefix.positions, end, shown=self.prefix.mask)
        mask = self.mask(live)
        check_columns(model, mask)
        # Padding stands anywhere.
        positions = (self.next[:, None] + live.cumsum(dim=1) - 1).clamp_min(0)
        with effective(model, self.cache, self.prefix, edit=self.edit, positions=lambda: self.at):
            output = call(
                model.module, ids, self.cache, positions, mask, logits_to_keep=1 if last else 0
            )
        self.at = torch.cat((self.at, positions), dim=1)
        self.seen, self.next = mask, ends
        logits = output.logits
        assert isinstance(logits, Tensor)  # transformers leaves it untyped
        return logits

    def mask(self, live: Int[Tensor, "b s"]) -> Int[Tensor, "b t"]:
        """Of the whole length, always.

        Without one, transformers takes positions that do not start at 0 for packed sequences, and
        cuts the prefix off.
        """
        return torch.cat((self.seen, live), dim=1)

    def held(self) -> KVCache:
        """All that was read so far, as a value; reading on does not change it.

        It says of itself what the prefix said. What a forward that failed left in some of the
        layers is not in it.

        Raises:
            CacheLayoutError: rows are padded, or something is hidden.
        """
        if self.prefix is not None:
            self.prefix.require_plain("read on and kept")
        layers: Any = self.cache.layers
        end = self.at.shape[1]
        made = read(
            [(layer.keys[:, :, :end], layer.values[:, :, :end]) for layer in layers],
            self.at,
            rotations=self.model.rotary(self.at),
            model=self.model.spec.identity,
        )
        if self.prefix is None:
            return made
        return replace(made, approximate=self.prefix.approximate, note=self.prefix.note)

    def widen(self, rows: int) -> None:
        """Go on with ``rows`` sequences that all begin with what one has read."""
        self.cache.batch_repeat_interleave(rows)
        self.seen = self.seen.repeat_interleave(rows, dim=0)
        self.next = self.next.repeat_interleave(rows)
        self.at = self.at.repeat_interleave(rows, dim=0)
        if self.prefix is not None:
            self.prefix = self.prefix.expand(rows)
