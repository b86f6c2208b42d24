"""kvtransfer pack build|show|transfer|generate|request|export"""

import json
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from kvtransfer.cli.console import AsJson, Device, Dtype, bars, foreseen, show, warn
from kvtransfer.cli.gate import GateOption, named_gate
from kvtransfer.cli.vectors import Vectors, named_vectors

app = typer.Typer(
    help="Guide packs: prefixes that are prepared once, and restored without a forward pass.",
    no_args_is_help=True,
)

Folder = Annotated[str, typer.Argument(help="Folder of a pack, or its id on the hub.")]
Out = Annotated[Path, typer.Option(help="Folder to write; a pack that is there is replaced.")]


@app.command()
def build(
    model: Annotated[
        str, typer.Argument(help="Model that reads the guides, and later their caches.")
    ],
    guides: Annotated[
        Path,
        typer.Argument(help='JSON lines: {"name": "…", "guide": "…"}; other fields are left.'),
    ],
    out: Out,
    chat: Annotated[
        bool, typer.Option("--chat", help="Read each guide as the system message of a chat.")
    ] = False,
    device: Device = "cpu",
    dtype: Dtype = None,
    as_json: AsJson = False,
) -> None:
    """Let a model read every guide once, and keep its caches."""
    with foreseen():
        from kvtransfer.guides import shelf
        from kvtransfer.guides.guide import read_guides
        from kvtransfer.guides.pack import GuidePack
        from kvtransfer.hf.model import load
        from kvtransfer.hf.quiet import quiet

        quiet()
        texts = read_guides(guides, questions=False)
        shelf.refuse_foreign(out)  # before the model reads, not after
        with bars(read=len(texts)) as advance:
            made = GuidePack.build(
                load(model, dtype=dtype, device=device),
                texts,
                chat=chat,
                into=out,
                progress=lambda tokens: advance("read", 1),
            )
        show(made, made.to_json() if as_json else None)


@app.command("show")
def show_(pack: Folder, as_json: AsJson = False) -> None:
    """List the guides of a pack, and how each was made."""
    with foreseen():
        from kvtransfer.guides.pack import GuidePack

        found = GuidePack.from_pretrained(pack)
        show(found, found.to_json() if as_json else None)


@app.command()
def transfer(
    pack: Folder,
    mapping: Annotated[
        str, typer.Option(help="Folder of a mapping, or the name of one that ships.")
    ],
    out: Out,
    target: Annotated[
        str | None,
        typer.Option(help="The mapping's target; needed where the mapping starts with its layers."),
    ] = None,
    device: Device = "cpu",
    gate: GateOption = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="Of the new pack, or of the target that is run; this pack's if not given."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Make a pack of one model into a pack for another, through a mapping.

    Neither model reads the guides. A mapping below the gate, by what was recorded when it was
    fitted, is warned of, and the pack is written all the same.
    """
    with foreseen():
        from kvtransfer.fitting.mapping import KVMapping
        from kvtransfer.guides import shelf
        from kvtransfer.guides.pack import GuidePack
        from kvtransfer.hf.model import load
        from kvtransfer.hf.quiet import quiet
        from kvtransfer.report import to_json

        quiet()
        asked_gate = named_gate(gate, mapping)
        shelf.refuse_foreign(out)
        found = GuidePack.from_pretrained(pack)
        fitted = KVMapping.from_pretrained(mapping)
        reader = (
            None
            if target is None
            else load(target, dtype=dtype or found.maker.spec.dtype, device=device)
        )
        with bars(map=len(found)) as advance:
            made = found.transferred(
                fitted,
                target=reader,
                dtype=dtype,
                device=device,
                into=out,
                progress=lambda tokens: advance("map", 1),
            )
        document = made.to_dict()
        if asked_gate is not None:
            judgement = asked_gate.of(fitted)
            document["gate"] = judgement.to_dict()
            if judgement.below is not False:
                warn(judgement.said())
        show(made, to_json(document) if as_json else None)


@app.command()
def generate(
    pack: Folder,
    name: Annotated[str, typer.Argument(help="The guide to stand under the prompt.")],
    prompt: Annotated[str, typer.Option(help="What is said after the guide.")],
    model: Annotated[
        str | None, typer.Option(help="The pack's model, where it lies elsewhere now.")
    ] = None,
    seam: Annotated[
        Literal["strict", "back-off"],  # as guides.seam has it, and without importing torch
        typer.Option(
            help="Where no token ends between guide and prompt: refuse (strict), or read the "
            "guide's last tokens live (back-off)."
        ),
    ] = "strict",
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to write at most.")] = 128,
    edit: Annotated[
        str | None,
        typer.Option(help="An edit of its cache: Ablate(removed,layers=mid), or Steer(v,1.0)."),
    ] = None,
    every_step: Annotated[
        bool,
        typer.Option("--every-step", help="Edit all that is cached, anew at every token."),
    ] = False,
    vector: Vectors = None,
    cast: Annotated[bool, typer.Option(help="Allow a model of another dtype.")] = False,
    device: Device = "cpu",
    dtype: Dtype = None,
    as_json: AsJson = False,
) -> None:
    """Write on after a guide and a prompt, greedily; the guide is restored, not read."""
    with foreseen():
        from kvtransfer.guides.pack import GuidePack
        from kvtransfer.hf.model import load
        from kvtransfer.hf.quiet import quiet
        from kvtransfer.steering.expression import parse

        quiet()
        if edit is None and (every_step or vector):
            raise ValueError("--every-step and --vector say how to edit, and there is no --edit")
        found = GuidePack.from_pretrained(pack)
        guide, made_by = found[name], found.maker.spec
        reader = load(model or made_by.name, dtype=dtype or made_by.dtype, device=device)
        graft = guide.graft(reader, cast=cast)
        if edit is not None:
            graft = graft.edited(parse(edit, named_vectors(vector)), every_step=every_step)
        joint = graft.joined(prompt, seam=seam)
        moved = joint.moved
        if moved is not None and not as_json:
            print(f"note: {moved}", file=sys.stderr)
        pieces = []
        for piece in graft.stream(joint, max_new_tokens=max_new_tokens):
            pieces.append(piece)
            if not as_json:
                sys.stdout.write(piece)
                sys.stdout.flush()
        if as_json:
            text = "".join(pieces)
            document = {"guide": name, "prompt": prompt, "seam_moved": moved, "text": text}
            sys.stdout.write(json.dumps(document, ensure_ascii=False))
        sys.stdout.write("\n")


@app.command()
def request(
    pack: Annotated[Path, typer.Argument(help="Folder of a pack that a server has, by its name.")],
    name: Annotated[str, typer.Argument(help="The guide to stand under the prompt.")],
    prompt: Annotated[str, typer.Option(help="What is said after the guide.")],
    model: Annotated[
        str | None,
        typer.Option(help="The pack's model, where its tokenizer lies elsewhere now."),
    ] = None,
    served: Annotated[
        str | None, typer.Option(help="What the server calls the model; its name if not given.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to write at most.")] = 128,
    as_json: AsJson = True,
) -> None:
    """Print the JSON that asks a server for a guide: POST it to /v1/completions.

    See docs/serving.md for how to start one. No model is loaded.
    """
    del as_json  # as every command has it; what this one prints is JSON in any case
    with foreseen():
        from kvtransfer.guides.pack import GuidePack
        from kvtransfer.hf.quiet import quiet
        from kvtransfer.serving.request import completion

        quiet()
        reader = model or GuidePack.from_pretrained(pack).maker.spec.name
        body = completion(pack, name, prompt, model=reader, max_tokens=max_new_tokens)
        body["model"] = served or reader
        sys.stdout.write(json.dumps(body) + "\n")


@app.command()
def export(
    pack: Folder,
    name: Annotated[str, typer.Argument(help="The guide to export.")],
    out: Annotated[Path, typer.Option(help="Folder to write.")],
    as_json: AsJson = False,
) -> None:
    """Write a guide as an adapter of peft's CARTRIDGE kind."""
    with foreseen():
        from kvtransfer.guides.cartridge import export_cartridge
        from kvtransfer.guides.pack import GuidePack

        guide = GuidePack.from_pretrained(pack)[name]
        export_cartridge(guide, out)
        document = {"adapter": str(out), "guide": name, "tokens": guide.tokens}
        show(
            f"{guide.tokens} virtual tokens in {out}",
            json.dumps(document, ensure_ascii=False) if as_json else None,
        )
