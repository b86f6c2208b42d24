"""Which guide a client asks for: two names, and never a place."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from kvtransfer.errors import GuideRefused

PACK = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
"""What a pack's folder may be called: it is put behind the folder of all packs."""

LONGEST = 1000
"""Letters of a guide's name. It is looked up in its pack's list, and no part of any path."""

FIELDS = ("pack", "guide")
EXAMPLE = '{"pack": "harbour-pack", "guide": "harbour"}'


@dataclass(frozen=True, slots=True)
class Asked:
    """A pack and a guide of it, by names that were looked at."""

    pack: str
    guide: str

    @classmethod
    def of(cls, params: object) -> "Asked | None":
        """What a request's ``kv_transfer_params`` ask for; None where they name no guide at all.

        Raises:
            GuideRefused: they are malformed, or a name is none.
        """
        if not params:
            return None
        if not isinstance(params, Mapping) or set(params) != set(FIELDS):
            given = sorted(map(str, params)) if isinstance(params, Mapping) else type(params)
            raise GuideRefused(
                f"kv_transfer_params hold {str(given)[:100]}, not pack and guide",
                hint=f"such as {EXAMPLE}",
            )
        pack, guide = params["pack"], params["guide"]
        if not isinstance(pack, str) or PACK.fullmatch(pack) is None:
            raise GuideRefused(
                f"no pack can be called {str(pack)[:100]!r}",
                hint="letters, digits, '.', '_' and '-', the first a letter or a digit: the name "
                "of a folder among the server's packs, and no path",
            )
        if not isinstance(guide, str) or not 0 < len(guide) <= LONGEST:
            raise GuideRefused(
                f"no guide can be called {str(guide)[:100]!r}",
                hint="a guide's name, as `kvtransfer pack show` lists it",
            )
        return cls(pack, guide)
