"""A conversation that several models hold by turns, each going on from what the others have read.

One model is current: it reads and writes. Whoever takes over gets a cache of the whole history,
mapped from the current model's. Three things are always so:

- ``session.cache.tokens == len(session.ids)``: the current model's cache holds the tokens that were
  seen, each one, the last one too. What a cache does not hold, the logits after its last token, is
  kept beside it; so the last token is never mapped, and whoever takes over reads it live.
- Token ids are kept and appended. A text that is fed is tokenized by itself: nothing can be
  tokenized together with a text that has been read already, so a word that two feeds split stays
  split. Feed whole words with the space before them, as tokenizers write them, or ids.
- An operation that fails changes nothing.

A model that reads on after a switch makes keys and values of its own upon keys and values that are
only nearly right; mapped back as a whole, errors are mapped too. ``how="new"`` keeps what a model
has read itself and maps no token twice.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from numbers import Integral
from typing import get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvtransfer.errors import (
    CacheLayoutError,
    IncompatibleModels,
    ModelNotFound,
    require,
)
from kvtransfer.fitting.mapping import KVMapping
from kvtransfer.geometry.cache import KVCache
from kvtransfer.guides.drift import (
    TOKENS,
    Drift,
    RePrefill,
    drift_between,
    first_deviation,
    scored_at_most,
)
from kvtransfer.guides.recompute import LAYERS
from kvtransfer.guides.seat import (
    How,
    Seat,
    Switch,
    by_direction,
    fed,
    policed,
    read_on,
    read_through,
    require_one_vocabulary,
    taken_over,
)
from kvtransfer.hf.fits import check_fits, check_room
from kvtransfer.hf.model import LanguageModel, require_model
from kvtransfer.hf.pieces import pieces
from kvtransfer.hf.reader import Reader
from kvtransfer.hf.run import end_tokens


class Session:
    """A history of tokens, and the models that go on with it by turns.

    >>> session = Session({"small": small, "large": large}, [there, back])
    >>> session.feed("The harbour opens with the code 4821.")
    >>> session.switch_to("large")
    >>> session.generate(" The code is", max_new_tokens=4)

    Args:
        models: By name; the first one is current. They must cut text into the same tokens.
        mappings: Between any of them; each finds its place by the models that it names.
        policy: When a model reads everything itself after a switch; never if not given.

    Raises:
        IncompatibleModels: tokenizers differ, or a mapping is for other models.
        WrongKind: there is something else than models, or than mappings.
    """

    def __init__(
        self,
        models: Mapping[str, LanguageModel],
        mappings: Iterable[KVMapping] = (),
        *,
        policy: RePrefill | None = None,
    ) -> None:
        require("models", models, Mapping, "a dict", hint='{"small": one, "large": other}')
        if not models:
            raise ValueError("a session needs a model")
        for name, model in models.items():
            require_model(model, f"model {name!r}")
        if policy is not None:
            require("policy", policy, RePrefill, "a RePrefill", hint="RePrefill(deviation=0.5)")
        require_one_vocabulary(models)
        self._models = dict(models)
        self._mappings = by_direction(self._models, mappings)
        self._policy = policy
        self._current = next(iter(models))
        self._ids = torch.empty(0, dtype=torch.long)
        self._seats: dict[str, Seat] = {}
        self._streaming = False

    def __repr__(self) -> str:
        names = ", ".join(f"{name}*" if name == self._current else name for name in self._models)
        return f"Session({names}: {len(self._ids)} tokens)"

    @property
    def current(self) -> str:
        """The name of the model that reads and writes now."""
        return self._current

    @property
    def model(self) -> LanguageModel:
        """That model."""
        return self._models[self._current]

    @property
    def ids(self) -> Int[Tensor, " t"]:
        """All tokens that were seen, read or written by whomever."""
        return self._ids.clone()

    @property
    def text(self) -> str:
        """The same as text."""
        return self.model.decode(self._ids)

    @property
    def cache(self) -> KVCache | None:
        """The current model's cache of :attr:`ids`; None before anything was seen."""
        seat = self._seats.get(self._current)
        return None if seat is None else seat.cache

    def feed(self, text: str | Int[Tensor, " t"] | Sequence[int]) -> None:
        """Let the current model read on.

        Args:
            text: What comes next. A text that comes first gets the tokenizer's opening (a begin of
                sequence) before it; ids are taken as they are.

        Raises:
            TextError: there is nothing to read.
            CacheLayoutError: the ids are no row of ids, or one is unknown to a model; or history
                and text are longer than the current model has positions for.
            WrongKind: it is neither text nor ids.
        """
        self._read(self._fed(text), last=True)

    def feed_scored(self, text: str | Int[Tensor, " t"] | Sequence[int]) -> Float[Tensor, "t v"]:
        """As :meth:`feed`; returns the logits that the current model predicted each token with.

        Raises:
            CacheLayoutError: nothing was fed before, so nothing predicts the first one; or as
                :meth:`feed`.
        """
        before = self._seat("scored").logits
        logits = self._read(self._fed(text), last=False)
        return torch.cat((before[None], logits[:-1]))

    def generate(
        self, text: str | Int[Tensor, " t"] | Sequence[int] | None = None, *, max_new_tokens: int
    ) -> str:
        """What the current model writes next, greedily; it joins the history.

        A token that ends the text is neither written nor seen: what follows may be fed.

        Args:
            text: To be fed first.
            max_new_tokens: At most.

        Raises:
            CacheLayoutError: nothing was fed yet, or the model has not as many positions.
            TextError, WrongKind: as :meth:`feed`.
        """
        if text is not None:
            self.feed(text)
        return "".join(self.stream(max_new_tokens=max_new_tokens))

    def stream(self, *, max_new_tokens: int) -> Iterator[str]:
        """As :meth:`generate`, piece by piece. What was written when the stream ends, or is closed
        before, joins the history then; until then nothing else can be done.

        Raises:
            CacheLayoutError: as :meth:`generate`.
        """
        seat = self._seat("gone on from")
        require("max_new_tokens", max_new_tokens, Integral, "a whole number", hint="say 64")
        if max_new_tokens < 1:
            raise ValueError(f"{max_new_tokens} new tokens; at least 1")
        check_room(self.model, len(self._ids) + max_new_tokens)
        return pieces(self.model.decode, self._written(seat, max_new_tokens))

    def switch_to(self, name: str, *, how: How = "new") -> Switch:
        """Let another model go on.

        All but the last token are kept or mapped; that one it reads itself. A mapping that starts
        with the target's first layers has them run on all of the history, at each switch.

        Args:
            name: Of the model.
            how: See :data:`How`. To the current model nothing is mapped; ``prefill`` lets it read
                everything again.

        Raises:
            ModelNotFound: no model goes by that name.
            IncompatibleModels: no mapping leads there.
            CacheLayoutError: the history is longer than that model has positions for.
        """
        self._require_idle()
        model = self._named(name)
        if how not in get_args(How):
            raise ValueError(f"how={how!r}; one of {', '.join(get_args(How))}")
        source, held = self._current, len(self._ids)
        found = Switch(source=source, target=name, how=how, kept=held, mapped=0, read=0)
        if held == 0:
            self._current = name
            return found
        check_room(model, held)
        if how == "prefill":
            self._seats[name], self._current = read_on(model, None, self._ids), name
            return replace(found, kept=0, read=held)
        if name == source:
            return found
        before = self._seats.get(name) if how == "new" else None
        kept = 0 if before is None else before.cache.tokens
        if before is not None and kept == held:  # nothing happened since
            self._current = name
            return found
        mapping = self._mapping(source, name)
        seat = taken_over(mapping, self._seats[source], before, model, self._ids)
        found = replace(found, kept=kept, mapped=held - kept - 1, read=1)
        if self._policy is not None:
            layers = self._telling(name)
            seat, found = policed(self._policy, model, seat, self._ids, found, layers=layers)
        self._seats[name] = seat
        self._current = name
        return found

    def drift(
        self,
        continuation: str | Int[Tensor, " t"] | Sequence[int] | None = None,
        *,
        tokens: int = TOKENS,
        own: KVCache | None = None,
    ) -> Drift:
        """The current model on its cache as it is, against itself on a true one.

        The price is a prefill of the history, as much as ``switch_to(current, how="prefill")``,
        after which there is none; :meth:`deviation` is cheaper and says less.

        Args:
            continuation: To predict, and not to keep. If not given, the last tokens of the history
                are predicted from what is held of those before them.
            tokens: How many of the last, and half of the history at most.
            own: A true cache of :attr:`ids`, where one is at hand: nothing is read then.

        Raises:
            CacheLayoutError: nothing was fed, or too little; or ``own`` is of other tokens.
        """
        seat = self._seat("measured")
        ids = self._ids
        if continuation is not None:
            more = self._fed(continuation)
            ids, tokens = torch.cat((ids, more)), len(more)
        else:
            tokens = scored_at_most(len(ids), tokens)
        if own is None:
            own = read_on(self.model, None, self._ids).cache
        check_fits(self.model, own)
        if own.tokens != len(self._ids):
            raise CacheLayoutError(
                f"an own cache of {own.tokens} tokens, and {len(self._ids)} were seen",
                hint="prefill(session.model, session.ids[None])",
            )
        return drift_between(self.model, ids, seat.cache, own, tokens=tokens)

    def deviation(self, *, layers: int | None = None) -> float:
        """By how much the current model's cache is off in its first layers, a mean over tokens.

        A cheap look for drift, at ``layers - 1`` of a prefill's layers: 0 for a true cache, about 1
        a layer and kind where keys and values are another text's.

        Args:
            layers: As many, from the first on. If not given, two, or one more than any mapping to
                this model leaves exact.

        Raises:
            CacheLayoutError: nothing was fed yet.
            RotationError: the model's table depends on how long a text it reads.
        """
        seat = self._seat("looked at")
        layers = self._telling(self._current) if layers is None else layers
        return first_deviation(self.model, self._ids, seat.cache, layers=layers)

    def _telling(self, name: str) -> int:
        """How many layers have to be looked at, so that one of them may be off."""
        starts = [m.start for (_, to), m in self._mappings.items() if to == name]
        wanted = max([LAYERS, *(start + 2 for start in starts if start is not None)])
        return min(wanted, len(self._models[name].spec.layers))

    def _read(self, ids: Int[Tensor, " t"], *, last: bool) -> Float[Tensor, "_t v"]:
        """Let the current model read ``ids``; the logits after each, or after the last."""
        self._require_idle()
        seat = self._seats.get(self._current)
        cache, carried = (None, 0) if seat is None else (seat.cache, seat.carried)
        made, logits = read_through(self.model, cache, ids, carried=carried, last=last)
        self._seats[self._current] = made
        self._ids = torch.cat((self._ids, ids))
        return logits

    def _written(self, seat: Seat, count: int) -> Iterator[int]:
        """Tokens that the current model writes; kept when this ends, however it ends."""
        self._require_idle()
        if self._seats.get(self._current) is not seat:
            raise CacheLayoutError(
                "the session went on since this stream was made", hint="make a new one"
            )
        reader = Reader.over(self.model, seat.cache)
        stops, logits, written = end_tokens(self.model), seat.logits, list[int]()
        self._streaming = True
        try:
            for _ in range(count):
                token = int(logits.argmax())
                if token in stops:
                    return
                with torch.no_grad():
                    logits = reader(torch.tensor([[token]]), last=True)[0, -1]
                written.append(token)
                yield token
        finally:
            self._streaming = False
            if written:
                self._seats[self._current] = Seat(reader.held(), logits, seat.carried)
                self._ids = torch.cat((self._ids, torch.tensor(written)))

    def _fed(self, text: str | Int[Tensor, " t"] | Sequence[int]) -> Int[Tensor, " t"]:
        return fed(text, (self.model, *self._models.values()), first=not len(self._ids))

    def _named(self, name: str) -> LanguageModel:
        if name not in self._models:
            raise ModelNotFound(
                f"no model {name!r} is in this session", hint=f"one of {', '.join(self._models)}"
            )
        return self._models[name]

    def _mapping(self, source: str, target: str) -> KVMapping:
        if (source, target) not in self._mappings:
            raise IncompatibleModels(
                f"no mapping leads from {source} to {target}",
                hint="fit one (kvtransfer fit SOURCE TARGET --out DIR), or let it read the history "
                f"itself: switch_to({target!r}, how='prefill')",
            )
        return self._mappings[source, target]

    def _seat(self, purpose: str) -> Seat:
        self._require_idle()
        if self._current not in self._seats:
            raise CacheLayoutError(
                f"nothing was fed yet, so there is nothing to be {purpose}",
                hint="session.feed(text) first",
            )
        return self._seats[self._current]

    def _require_idle(self) -> None:
        if self._streaming:
            raise CacheLayoutError(
                "a stream of this session is not at its end",
                hint="read it to the end, or close() it",
            )
