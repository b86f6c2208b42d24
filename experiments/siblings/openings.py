"""The first words from which the full model is sampled: varied in kind, few in number.

The bare start of a document is among them; most of the variety comes from sampling.
"""

from collections.abc import Iterator
from random import Random
from typing import Any

from experiments.siblings import facts

ENCYCLOPAEDIA = (
    "The history of the city begins",
    "The species was first described in",
    "He was born in 18",
    "She was an American",
    "The river rises in the",
    "The album was released in",
    "The battle took place on",
    "The film stars",
    "The church of St",
    "The season was the club's",
    "The game was developed by",
    "The song was written by",
    "The ship was laid down in",
    "The storm formed on",
    "The bird is found in",
    "The town lies on the",
    "The episode originally aired on",
    "The regiment was formed",
    "The novel is set in",
    "The railway opened in",
    "In mathematics, a",
    "In chemistry, the compound",
    "The treaty was signed",
    "The castle was built",
    "The painting shows",
    "The highway begins at",
    "The election of 19",
    "According to the census,",
    "The language is spoken by",
    "The disease is caused by",
)

STORIES = (
    "Once upon a time,",
    "The old man opened the door and",
    "It was raining when",
    "Nobody in the village remembered",
    '"I did not expect you,"',
    "She ran down the stairs",
    "The captain looked at the sea and",
    "When the lights went out,",
    "My grandmother used to say",
    "On the last day of summer,",
    "The letter arrived on a",
    "He had never seen a",
    "Behind the house there was",
    "The dog barked twice, and",
    "Far away in the mountains",
)

NEWS = (
    "The government announced on Monday",
    "Police said on Tuesday that",
    "The company reported",
    "Scientists have discovered",
    "A new study suggests",
    "The prime minister told",
    "Shares fell after",
    "Hundreds of people gathered",
    "The team won",
    "Residents of the town",
    "The court ruled that",
    "A fire broke out",
    "Researchers at the University of",
    "The report, published",
    "Officials warned",
)

LETTERS = (
    "Dear Sir or Madam,",
    "Dear Anna,\n\nThank you for",
    "To whom it may concern:",
    "Hi all,\n\nJust a quick",
    "My dear friend,",
    "Dear Editor,",
    "Hello Tom,\n\nI hope",
    "From: ",
)

LESSONS = (
    "Photosynthesis is",
    "In this chapter we",
    "How to bake",
    "Step 1:",
    "The main causes of",
    "There are three kinds of",
    "Exercise 4.",
    "Recipe: ",
    "The human heart",
    "To understand gravity,",
    "Many people believe that",
    "The difference between",
    "For example, suppose",
    "One of the most important",
    "Why do",
    "# Introduction\n\n",
    "Abstract. We",
    "Frequently asked questions\n\n",
    "The water cycle",
    "def ",
)

REQUESTS = (
    "Tell me about the history of Portugal.",
    "Write a short story about a lighthouse.",
    "What is the difference between a virus and a bacterium?",
    "Give me three tips for a good night's sleep.",
    "Explain how a bicycle stays upright.",
    "Write an email to my landlord about a broken heater.",
    "Summarise the plot of a famous play.",
    "Who are you?",
    "What should I cook tonight?",
    "Describe a rainy day in the city.",
)

START = "<|endoftext|>"
"""What parts documents in SmolLM2's training: the bare opening, and the start of all others."""


def openings(tokenizer: Any, seed: int) -> Iterator[list[int]]:
    """Token ids of openings, without end: of four, two prose, one chat, one bare or a lesson."""
    random = Random(seed)
    prose = (*ENCYCLOPAEDIA, *STORIES, *NEWS, *LETTERS)
    while True:
        texts = [
            START + random.choice(prose),
            START + random.choice(prose),
            START + random.choice((*LESSONS, *[""] * len(LESSONS))),
            _chat(tokenizer, random),
        ]
        for text in random.sample(texts, k=len(texts)):
            yield tokenizer(text, add_special_tokens=False)["input_ids"]


def _chat(tokenizer: Any, random: Random) -> str:
    if random.random() < 0.5:
        messages = [{"role": "user", "content": random.choice(REQUESTS)}]
    else:
        paragraph, asked = facts.guide(random, longest=8)
        messages = [
            {"role": "system", "content": paragraph},
            {"role": "user", "content": asked[0].question},
        ]
    text: str = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return text
