"""Paragraphs of invented facts, with questions that only the paragraph answers.

A model that lost layers loses this skill first: prose can be guessed, a made-up code cannot.
"""

from collections.abc import Callable, Iterator
from random import Random
from typing import NamedTuple

WORDS = """
colour: amber black blue brass copper crimson green grey ivory purple red silver white
thing: bell boat box bridge cabinet clock door drawer gate kettle ladder lantern lock map mirror
thing: piano ring safe ship suitcase table tower train umbrella van wagon
trade: baker carpenter diver farmer geologist glazier judge librarian miller nurse painter pilot
trade: potter sailor surgeon tailor teacher translator welder
food: apricots barley bread cheese figs honey lentils mushrooms olives pears plums rice soup
food: walnuts
animal: badger crane falcon fox goat hare heron lynx otter owl salmon stork wolf
event: auction concert exam festival hearing inspection lecture meeting parade race rehearsal
event: wedding
day: Monday Tuesday Wednesday Thursday Friday Saturday Sunday
first: Ada Bruno Chidi Dalia Edvin Farah Greta Hugo Imani Jonas Keiko Lars Mina Nadia Oscar Priya
first: Quentin Rosa Samir Tove Ulla Viktor Wanda Yusuf Zelda
onset: b br d dr f g gr h k kl l m n p r s st t th v z
vowel: a e i o u ai ea ou
coda: ck dor l len m mar n nd r ria s sk th ton vale x
"""
"""What facts are made of, one kind of word a line."""


def _word(random: Random, kind: str) -> str:
    return random.choice(LISTS[kind])


def _lists() -> dict[str, list[str]]:
    lists: dict[str, list[str]] = {}
    for line in WORDS.strip().splitlines():
        kind, _, words = line.partition(":")
        lists.setdefault(kind, []).extend(words.split())
    return lists


LISTS = _lists()


class Fact(NamedTuple):
    """A statement, a question that it answers, and that answer."""

    statement: str
    question: str
    answer: str


def invented(random: Random) -> str:
    """A name that no corpus holds, such as ``Strothumar``."""
    syllables = (
        _word(random, "onset") + _word(random, "vowel") for _ in range(random.randint(1, 2))
    )
    return ("".join(syllables) + _word(random, "coda")).capitalize()


def _thing(random: Random) -> str:
    return f"{_word(random, 'colour')} {_word(random, 'thing')}"


def _person(random: Random) -> str:
    return f"{_word(random, 'first')} {invented(random)}"


def _code(random: Random) -> Fact:
    thing, code = _thing(random), str(random.randint(100, 99999))
    return Fact(f"The code of the {thing} is {code}.", f"What is the code of the {thing}?", code)


def _owner(random: Random) -> Fact:
    thing, person = _thing(random), _person(random)
    return Fact(f"The {thing} belongs to {person}.", f"Who owns the {thing}?", person)


def _home(random: Random) -> Fact:
    person, town = _person(random), invented(random)
    return Fact(f"{person} lives in {town}.", f"Where does {person} live?", town)


def _trade(random: Random) -> Fact:
    person, trade = _person(random), _word(random, "trade")
    return Fact(f"{person} is a {trade}.", f"What is the profession of {person}?", trade)


def _capital(random: Random) -> Fact:
    land, town = invented(random), invented(random)
    return Fact(f"The capital of {land} is {town}.", f"What is the capital of {land}?", town)


def _weight(random: Random) -> Fact:
    thing, weight = _thing(random), f"{random.randint(2, 990)} kilograms"
    return Fact(f"The {thing} weighs {weight}.", f"How much does the {thing} weigh?", weight)


def _event(random: Random) -> Fact:
    event, town = _word(random, "event"), invented(random)
    when = f"{_word(random, 'day')} at {random.randint(1, 12)}:{random.randint(0, 5)}0"
    return Fact(f"The {event} in {town} is on {when}.", f"When is the {event} in {town}?", when)


def _password(random: Random) -> Fact:
    place, word = invented(random), f"{_word(random, 'animal')}-{random.randint(10, 999)}"
    statement = f"To enter {place} one must say {word}."
    return Fact(statement, f"What must one say to enter {place}?", word)


def _food(random: Random) -> Fact:
    person, food = _person(random), _word(random, "food")
    return Fact(f"{person} eats only {food}.", f"What does {person} eat?", food)


def _symbol(random: Random) -> Fact:
    land, animal = invented(random), _word(random, "animal")
    statement = f"The people of {land} carry a {animal} on their flag."
    return Fact(statement, f"Which animal is on the flag of {land}?", animal)


KINDS: tuple[Callable[[Random], Fact], ...] = (
    _code,
    _owner,
    _home,
    _trade,
    _capital,
    _weight,
    _event,
    _password,
    _food,
    _symbol,
)
"""Every kind of fact. To add one, write its function and name it here."""


def guide(random: Random, *, shortest: int = 4, longest: int = 14) -> tuple[str, list[Fact]]:
    """A paragraph of facts and, in random order, the facts to ask for; no question twice."""
    facts: dict[str, Fact] = {}
    for _ in range(random.randint(shortest, longest)):
        fact = random.choice(KINDS)(random)
        facts.setdefault(fact.question, fact)
    paragraph = " ".join(fact.statement for fact in facts.values())
    asked = random.sample(list(facts.values()), k=min(len(facts), random.randint(2, 6)))
    return paragraph, asked


def documents(seed: int) -> Iterator[str]:
    """Guides with their questions answered, without end."""
    random = Random(seed)
    while True:
        paragraph, asked = guide(random)
        answers = (f"Question: {fact.question}\nAnswer: {fact.answer}" for fact in asked)
        yield paragraph + "\n\n" + "\n\n".join(answers)
