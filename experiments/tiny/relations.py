"""What made-up facts are about: word lists, and the relations that join them."""

from dataclasses import dataclass


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


ADJECTIVES = _words(
    "amber black blue brass brown copper cracked dusty empty glass gold green grey heavy hollow "
    "iron ivory large narrow old orange painted pale plain purple red round rusty silver small "
    "square stone tall velvet violet white wide wooden yellow young"
)
NOUNS = _words(
    "anchor barn basket bell boat book bottle bowl box bridge candle cart chair chest clock cup "
    "desk door drum engine fence flag gate hammer hat key kite ladder lamp locker map mill mirror "
    "needle oven piano pump rope safe shelf ship spoon stove table tower train trunk tunnel vase "
    "vault violin wagon wheel window"
)
PEOPLE = _words(
    "Ada Alma Anton Bela Bruno Carla Cyril Dora Edgar Elsa Emil Fritz Greta Hanna Hugo Ida Igor "
    "Ines Ivan Jana Jonas Karl Lena Leo Lora Marek Mira Nadia Nils Nora Olaf Oscar Otto Paula "
    "Petra Rosa Ruth Selma Silas Sonja Stella Tara Theo Tilda Ulla Vera Victor Wanda Yuri Zoe"
)
TOWNS = _words(
    "Aldern Barrow Calder Dunmore Elmsford Fernley Garth Holm Irving Kelso Larch Marston Norwick "
    "Oakham Penrith Quarry Redmoor Selby Thornby Upton Varnly Westrow Yarrow Ashby Birkdale Corby"
)
ROOMS = _words(
    "attic cellar kitchen garden library stable workshop chapel cabin garage office pantry tower "
    "harbour market school station museum bakery forest"
)
JOBS = _words(
    "baker barber butcher captain carpenter cook doctor driver farmer gardener judge miller nurse "
    "painter pilot printer sailor singer tailor teacher weaver writer"
)
FOODS = _words(
    "apples barley beans bread butter carrots cheese cherries corn figs grapes honey lemons milk "
    "mushrooms nuts olives onions peaches pears plums rice salt soup tea"
)
ONSETS = _words("b br d dr f fl g gr h k kl l m n p pr r s st t tr v w z")
RIMES = _words("al an ar ax el en er il im in ok ol on or ot ul um un ur")


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One relation: how to state it and how to ask for it.

    ``{s}`` is the subject and ``{v}`` the value. A question stops just before the value, so that
    the value and a full stop are its answer.
    """

    subject: str
    value: str
    statements: tuple[str, ...]
    questions: tuple[str, ...]


KINDS = (
    Kind(
        subject="thing",
        value="code",
        statements=(
            "The code of the {s} is {v}.",
            "To open the {s}, enter {v}.",
            "The {s} opens with {v}.",
            "Remember {v} for the {s}.",
        ),
        questions=(
            "What is the code of the {s}?",
            "Which code opens the {s}?",
            "The code of the {s} is",
            "The {s} opens with",
        ),
    ),
    Kind(
        subject="thing",
        value="room",
        statements=(
            "The {s} is kept in the {v}.",
            "You will find the {s} in the {v}.",
            "In the {v} there is the {s}.",
            "They left the {s} in the {v}.",
        ),
        questions=(
            "Where is the {s}? In the",
            "Where is the {s} kept? It is in the",
            "The {s} is kept in the",
            "Which room holds the {s}? The",
        ),
    ),
    Kind(
        subject="thing",
        value="person",
        statements=(
            "The {s} belongs to {v}.",
            "{v} owns the {s}.",
            "The owner of the {s} is {v}.",
            "The {s} was given to {v}.",
        ),
        questions=(
            "Who owns the {s}?",
            "Whose is the {s}? It belongs to",
            "The owner of the {s} is",
            "The {s} belongs to",
        ),
    ),
    Kind(
        subject="thing",
        value="invented",
        statements=(
            "The password of the {s} is {v}.",
            "Say {v} to the {s}.",
            "The {s} listens to the password {v}.",
            "On the {s} is written {v}.",
        ),
        questions=(
            "What is the password of the {s}?",
            "Which password does the {s} know?",
            "The password of the {s} is",
        ),
    ),
    Kind(
        subject="person",
        value="town",
        statements=(
            "{s} lives in {v}.",
            "The home of {s} is {v}.",
            "{s} has a house in {v}.",
            "{v} is where {s} lives.",
        ),
        questions=(
            "Where does {s} live? In",
            "What is the home of {s}?",
            "{s} lives in",
            "In which town is {s} at home?",
        ),
    ),
    Kind(
        subject="person",
        value="job",
        statements=(
            "{s} works as the {v}.",
            "The {v} is called {s}.",
            "{s} is our {v}.",
            "People know {s} as the {v}.",
        ),
        questions=(
            "What is the work of {s}? The",
            "What does {s} do? {s} is the",
            "{s} works as the",
        ),
    ),
    Kind(
        subject="person",
        value="food",
        statements=(
            "{s} likes {v} best.",
            "{s} asked for {v}.",
            "The favourite food of {s} is {v}.",
            "Please bring {s} some {v}.",
        ),
        questions=(
            "What does {s} like?",
            "Which food should we bring {s}?",
            "The favourite food of {s} is",
        ),
    ),
    Kind(
        subject="person",
        value="code",
        statements=(
            "The number of {s} is {v}.",
            "Call {s} at {v}.",
            "{s} can be reached at {v}.",
        ),
        questions=(
            "What is the number of {s}?",
            "Which number has {s}?",
            "The number of {s} is",
            "Call {s} at",
        ),
    ),
    Kind(
        subject="invented",
        value="noun",
        statements=(
            "The word {s} means {v}.",
            "A {s} is a kind of {v}.",
            "In their language {s} is {v}.",
        ),
        questions=(
            "What does {s} mean?",
            "What is a {s}? A kind of",
            "The word {s} means",
        ),
    ),
)
