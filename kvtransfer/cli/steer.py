"""kvtransfer steer extract|sweep|generate"""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from kvtransfer.cli.console import AsJson, Device, Dtype, bars, foreseen, show

app = typer.Typer(
    help="Steering vectors: added to the cache once, after the prompt is read.",
    no_args_is_help=True,
)

Model = Annotated[str, typer.Argument(help="Model whose cache is steered.")]
Vector = Annotated[str, typer.Argument(help="Folder of a vector, or its id on the hub.")]
Chat = Annotated[
    bool, typer.Option("--chat", help="Plain texts are what a user says in a conversation.")
]
KeyStrength = Annotated[float, typer.Option(help="Of the keys, times the strength.")]
ValueStrength = Annotated[float, typer.Option(help="Of the values, times the strength.")]
Layers = Annotated[
    str, typer.Option(help="all, early, mid, late, 3-7, or 9-20/32: of a model of 32, scaled.")
]
After = Annotated[
    str,
    typer.Option(
        help="Text to put after the prompt. Without it the answer's first token is the prompt's "
        "own, and steering begins behind it."
    ),
]
Tokens = Annotated[int, typer.Option(min=1, help="Tokens to write at most.")]
Temperature = Annotated[float, typer.Option(min=0, help="Of the draws; 0 is greedy.")]
Seed = Annotated[int, typer.Option(help="Of the draws.")]


@app.command()
def extract(
    model: Model,
    pairs: Annotated[
        Path,
        typer.Argument(
            help='JSON lines: {"positive": "…", "negative": "…"}, of texts or lists of messages; '
            "or builtin ones: steps, pirate."
        ),
    ],
    out: Annotated[Path, typer.Option(help="Folder to write; a vector that is there is replaced.")],
    at: Annotated[
        int, typer.Option(max=-1, help="Token to look at, from a prompt's end; -1 is the last.")
    ] = -1,
    chat: Chat = False,
    device: Device = "cpu",
    dtype: Dtype = None,
    as_json: AsJson = False,
) -> None:
    """Read a steering vector off contrastive pairs of prompts.

    Says so where the pairs hardly differ, and writes the vector all the same.
    """
    with foreseen():
        from kvtransfer.hf.model import load
        from kvtransfer.hf.quiet import quiet
        from kvtransfer.steering.extract import extract as read_off
        from kvtransfer.steering.pairs import read_pairs
        from kvtransfer.steering.vector import refuse_foreign

        quiet()
        told = read_pairs(pairs)
        refuse_foreign(out)  # before the model reads, not after
        with bars(pairs=len(told)) as advance:
            report = read_off(
                load(model, dtype=dtype, device=device),
                told,
                at=at,
                chat=chat,
                progress=lambda n: advance("pairs", n),
            )
        report.vector.save_pretrained(out)
        for note in report.notes if as_json else ():  # the table has them itself
            print(f"note: {note}", file=sys.stderr)
        show(report, report.to_json() if as_json else None)


@app.command()
def sweep(
    model: Model,
    vector: Vector,
    prompt: Annotated[
        list[str], typer.Option(help="To answer at every strength; may be given several times.")
    ],
    strengths: Annotated[str, typer.Option(help="Numbers, as 0,1,2,4.")] = "0,1,2,4,8,16",
    effect: Annotated[
        str | None,
        typer.Option(
            metavar="REGEX",
            help="What shows the effect, counted per 100 words; if not given, how much likelier "
            "the text is with steering than without.",
        ),
    ] = None,
    key_strength: KeyStrength = 1.0,
    value_strength: ValueStrength = 1.0,
    layers: Layers = "all",
    max_repetition: Annotated[
        float, typer.Option(help="Rise of repeated 3-grams that breaks a text.")
    ] = 0.25,
    max_nll: Annotated[
        float, typer.Option(help="Rise of the NLL without steering, per token, that breaks it.")
    ] = 1.5,
    max_broken: Annotated[
        float, typer.Option(help="Share of broken texts at a strength that is still useful.")
    ] = 0.25,
    chat: Chat = False,
    after: After = "",
    max_new_tokens: Tokens = 60,
    temperature: Temperature = 0.0,
    seed: Seed = 0,
    device: Device = "cpu",
    dtype: Dtype = None,
    as_json: AsJson = False,
) -> None:
    """Find the strengths at which a vector works and the text is not yet broken.

    Exit 1 if there are none.
    """
    with foreseen():
        from kvtransfer.hf.model import load
        from kvtransfer.hf.quiet import quiet
        from kvtransfer.hf.sample import Sampling
        from kvtransfer.steering.guard import Guard, Matches
        from kvtransfer.steering.sweep import SOMETHING
        from kvtransfer.steering.sweep import sweep as look
        from kvtransfer.steering.vector import CacheVector

        quiet()
        found = CacheVector.from_pretrained(vector)
        counted = None if effect is None else Matches(effect)
        with bars(sweep=len(prompt)) as advance:
            report = look(
                load(model, dtype=dtype, device=device),
                found,
                prompt,
                _numbers(strengths),
                key_strength=key_strength,
                value_strength=value_strength,
                layers=layers,
                chat=chat,
                after=_unescaped(after),
                max_new_tokens=max_new_tokens,
                effect=counted,
                guard=Guard(
                    repetition=max_repetition,
                    nll=max_nll,
                    broken=max_broken,
                    effect=SOMETHING if counted is None else 0.0,
                ),
                sampling=Sampling(temperature=temperature, floor=0.0) if temperature else None,
                seed=seed,
                progress=lambda n: advance("sweep", n),
            )
        show(report, report.to_json() if as_json else None)
    raise typer.Exit(0 if report else 1)


@app.command()
def generate(
    model: Model,
    vector: Vector,
    prompt: Annotated[str, typer.Option(help="What is said.")],
    strength: Annotated[float, typer.Option(help="Times the vector; negative is away from it.")],
    key_strength: KeyStrength = 1.0,
    value_strength: ValueStrength = 1.0,
    layers: Layers = "all",
    chat: Chat = False,
    after: After = "",
    max_new_tokens: Tokens = 128,
    temperature: Temperature = 0.0,
    seed: Seed = 0,
    device: Device = "cpu",
    dtype: Dtype = None,
    as_json: AsJson = False,
) -> None:
    """Answer a prompt with a vector added to its cache."""
    with foreseen():
        from kvtransfer.hf.model import load
        from kvtransfer.hf.quiet import quiet
        from kvtransfer.hf.sample import Sampling
        from kvtransfer.steering.answers import Start, answer
        from kvtransfer.steering.interventions.steer import Steer
        from kvtransfer.steering.vector import CacheVector

        quiet()
        found = CacheVector.from_pretrained(vector)
        steer = Steer(
            found,
            strength,
            key_strength=key_strength,
            value_strength=value_strength,
            layers=layers,
        )
        reader = load(model, dtype=dtype, device=device)
        start = Start.of(reader, prompt, at=found.at, chat=chat, after=_unescaped(after))
        (ids,) = answer(
            reader,
            start,
            [steer(start.prefix)],
            max_new_tokens=max_new_tokens,
            sampling=Sampling(temperature=temperature, floor=0.0) if temperature else None,
            seed=seed,
        )
        text = reader.decode(ids)
        document = {
            "prompt": prompt,
            "strength": strength,
            "key_strength": key_strength,
            "value_strength": value_strength,
            "layers": layers,
            "text": text,
            "notes": list(found.notes),
        }
        for note in () if as_json else found.notes:
            print(f"note: {note}", file=sys.stderr)
        sys.stdout.write(json.dumps(document, ensure_ascii=False) if as_json else text)
        sys.stdout.write("\n")


def _unescaped(text: str) -> str:
    r"""``\n`` as a line break: shells make it hard to write one."""
    return text.replace("\\n", "\n")


def _numbers(listed: str) -> list[float]:
    """What --strengths lists.

    Raises:
        ValueError: it is no list of numbers.
    """
    try:
        return [float(each) for each in listed.split(",")]
    except ValueError:
        raise ValueError(f"--strengths are numbers with commas, 0,1,2,4, not {listed!r}") from None
