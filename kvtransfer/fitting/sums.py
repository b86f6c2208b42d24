"""Sums over batches of rows, from which the moments of a pair are read when all are in."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import reduce

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvtransfer.fitting.layout import Layout
from kvtransfer.fitting.pairs import Flat, PairMoments, view

STRETCH = 16
"""Batches after which what lies between their means is added to the sums, and partial sums are.
Each time costs a walk over all of them."""

Allocate = Callable[[int], Flat]
"""Makes room for so many float64 zeros."""


def in_memory(numbers: int) -> Flat:
    """Room in this machine's memory."""
    return torch.zeros(numbers, dtype=torch.float64)


class Sums:
    """Gathers moments batch by batch in place: mutable, and spent when they are read.

    Each batch is centred by its own mean, and its products are added in double precision. What
    lies between means of batches (Chan, Golub & LeVeque 1979) is added a stretch at a time.

    Args:
        layout: Which products are kept.
        twins: Whether target features are gathered once more, paired with other rows.
        products: The dtype in which one batch's centred rows are multiplied. Sums over batches are
            in double precision either way; float32 products halve the time, and lose about seven
            digits of each batch's scatter.
        allocate: Where the sums lie.
        near: A device that is to hold sums over one stretch, in the dtype of the products, so that
            no batch's products have to leave it; None to add each batch's to the sums.
    """

    def __init__(
        self,
        layout: Layout,
        *,
        twins: bool = False,
        products: torch.dtype = torch.float64,
        allocate: Allocate = in_memory,
        near: torch.device | None = None,
    ) -> None:
        self._layout, self._products, self._near = layout, products, near
        sizes = {"gram": layout.gram_numbers, "cross": layout.cross_numbers}
        if twins:
            sizes["twin"] = layout.cross_numbers
        self._sums = {name: allocate(size) for name, size in sizes.items()}
        self._partial = {
            name: torch.zeros(size, dtype=products, device=near)
            for name, size in sizes.items()
            if near is not None
        }
        wide = {"x": layout.p, "y": layout.q} | ({"twin": layout.q} if twins else {})
        self._means = {name: torch.zeros(size).double() for name, size in wide.items()}
        self._squares = {
            name: torch.zeros(size).double() for name, size in wide.items() if name != "x"
        }
        self._between: dict[str, list[Tensor]] = {name: [] for name in wide}
        self._n = 0

    def add(
        self,
        x: Float[Tensor, "n p"],
        y: Float[Tensor, "n q"],
        *,
        weight: Float[Tensor, " n"] | None = None,
        order: Int[Tensor, " n"] | None = None,
        spend: bool = False,
    ) -> None:
        """Take one batch of rows in.

        Args:
            x: Source features.
            y: Target features.
            weight: How much each row counts, positive; their mean is taken to be one, so that a
                batch counts as many rows as it has.
            order: Which row's target features each row's twin is. A batch without is taken to
                have its twins at their mean: they add nothing to their sums, and cost nothing.
            spend: Whether ``x`` and ``y`` may be written to, which saves a copy of each.
        """
        count = len(x)
        if count == 0:
            return
        share = None if weight is None else weight.double() / weight.double().sum()
        x, mean_x = _centred(x, self._products, share, spend=spend)
        y, mean_y = _centred(y, self._products, share, spend=spend)
        if share is not None:
            root = (share * count).sqrt()[:, None].to(x)
            x, y = x * root, y * root
        rows, means = {"x": x, "y": y}, {"x": mean_x, "y": mean_y}
        if order is not None:
            rows["twin"], means["twin"] = y[order.to(y.device)], mean_y
        self._multiply(x, {"cross": y} | ({"twin": rows["twin"]} if "twin" in rows else {}))
        n = self._n + count
        between = self._n * count / n
        for name, mean in self._means.items():
            away = means[name] - mean if name in means else torch.zeros_like(mean)
            if name != "x" and name in rows:
                self._squares[name] += _squares(rows[name]) + between * away.square()
            self._between[name].append(away * between**0.5)
            mean += away * (count / n)
        self._n = n
        if len(self._between["x"]) == STRETCH:
            self._merge()

    def settle(self) -> None:
        """Let the device have its room back; no more can be added."""
        self._merge()
        self._partial = {}

    def moments(self) -> PairMoments:
        """What was gathered; no more can be added."""
        self.settle()
        for runs in self._layout.gram:
            for run in runs[:1]:
                square = view(self._sums["gram"], run)[:, : len(run.rows)]
                square.copy_(square.triu() + square.triu(1).mT)
        names = [name for name in ("y", "twin") if name in self._means]
        return PairMoments(
            n=self._n,
            mean_x=self._means["x"],
            mean_y=torch.cat([self._means[name] for name in names]),
            yy=torch.cat([self._squares[name] for name in names]),
            layout=self._layout,
            gram=self._sums["gram"],
            cross=self._sums["cross"],
            twin=self._sums.get("twin"),
        )

    def state(self) -> dict[str, Tensor]:
        """All that goes on from here depends on, by name; what is large is shared, not copied."""
        held = {f"sums.{name}": each for name, each in self._sums.items()}
        held |= {f"means.{name}": each for name, each in self._means.items()}
        held |= {f"squares.{name}": each for name, each in self._squares.items()}
        if self._between["x"]:
            held |= {f"partial.{name}": each.cpu() for name, each in self._partial.items()}
            held |= {f"between.{name}": torch.stack(each) for name, each in self._between.items()}
        return held | {"n": torch.tensor(self._n)}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Go on from a state of sums of the same layout."""
        for group, held in (
            ("sums", self._sums),
            ("means", self._means),
            ("squares", self._squares),
            ("partial", self._partial),
        ):
            for name, tensor in held.items():
                if f"{group}.{name}" in state:
                    tensor.copy_(state[f"{group}.{name}"])
        for name, rows in self._between.items():
            rows += list(state.get(f"between.{name}", torch.empty(0)).clone())
        self._n = int(state["n"])

    def _multiply(self, x: Tensor, targets: Mapping[str, Tensor]) -> None:
        """Add one batch's products to the sums, or to the stretch's."""
        for name, columns in ({"gram": x} | dict(targets)).items():
            placed = self._layout.gram if name == "gram" else self._layout.cross
            for runs in placed:
                for run in runs:
                    rows = x[:, run.rows.start : run.rows.stop].mT
                    beside = columns[:, run.start : run.stop]
                    if self._near is not None:
                        view(self._partial[name], run).addmm_(rows, beside)
                    else:
                        product = rows @ beside
                        view(self._sums[name], run).add_(product.to("cpu"))

    def _merge(self) -> None:
        """Add what one stretch's batches have between them, and their partial sums."""
        if not self._between["x"]:
            return
        between = {name: torch.stack(rows) for name, rows in self._between.items()}
        for name, flat in self._sums.items():
            placed = self._layout.gram if name == "gram" else self._layout.cross
            beside = between[{"gram": "x", "cross": "y", "twin": "twin"}[name]]
            partial = self._partial.get(name)
            for run in (run for runs in placed for run in runs):
                held = view(flat, run)
                if partial is not None:
                    held += view(partial, run).to("cpu")
                rows = between["x"][:, run.rows.start : run.rows.stop]
                held.addmm_(rows.mT, beside[:, run.start : run.stop])
            if partial is not None:
                partial.zero_()
        self._between = {name: [] for name in between}


def _centred(
    rows: Float[Tensor, "n p"],
    dtype: torch.dtype,
    share: Float[Tensor, " n"] | None,
    *,
    spend: bool,
) -> tuple[Float[Tensor, "n p"], Float[Tensor, " p"]]:
    """Rows less their mean, and the mean, in double precision."""
    mine = rows.to(dtype)
    if share is None:
        mean = _added(part.sum(0) for part in _wide(mine)) / len(mine)
    else:
        shares = share.to(mine.device).split(_step(mine))
        mean = _added(each @ part for each, part in zip(shares, _wide(mine), strict=True))
    near = mean.to(mine)
    return mine.sub_(near) if spend or mine is not rows else mine - near, mean.cpu()


def _squares(rows: Float[Tensor, "n q"]) -> Float[Tensor, " q"]:
    """The sum of squares of each column, in double precision."""
    return _added(part.square().sum(0) for part in _wide(rows)).cpu()


def _wide(rows: Float[Tensor, "n p"]) -> Iterator[Float[Tensor, "_n p"]]:
    """Rows in double precision, a few at a time: that many stay in a processor's cache."""
    return (part.double() for part in rows.split(_step(rows)))


def _step(rows: Tensor) -> int:
    return 16 if rows.device.type == "cpu" else len(rows)


def _added(parts: Iterable[Float[Tensor, " p"]]) -> Float[Tensor, " p"]:
    return reduce(torch.add, parts)
