"""The `hf-ssm` command.

Exit codes: 0 done, 1 failed, 2 wrong usage or bad input, 130 interrupted. An error is one readable line on stderr;
`hf-ssm --debug COMMAND ...` shows the traceback instead. Whatever is slow to import is imported inside its command.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode="markdown",
    help="State-space models as real Hugging Face models: train, generate, convert, and see what runs here.",
)
state_app = typer.Typer(no_args_is_help=True, help="Keep what a model remembers of a long text in a file.")
app.add_typer(state_app, name="state")
_debug = False


class Format(StrEnum):
    """The two layouts of published checkpoints."""

    hf = "hf"
    original = "original"


@app.callback()
def _options(
    debug: Annotated[bool, typer.Option("--debug", help="On an error, show the whole traceback.")] = False,
) -> None:
    global _debug
    _debug = debug


@contextmanager
def _readable_errors() -> Iterator[None]:
    """Turn what a command raises into one line and an exit code. The only place that catches everything."""
    try:
        yield
    except (typer.Exit, typer.BadParameter):
        raise
    except KeyboardInterrupt:
        typer.echo("interrupted", err=True)
        raise typer.Exit(130) from None
    except BrokenPipeError:  # whoever read our output has had enough
        sys.stderr.close()
        raise typer.Exit(1) from None
    except Exception as error:
        if _debug:
            raise
        bad_input = isinstance(error, ValueError | FileNotFoundError)
        if isinstance(error, ValueError | OSError):
            typer.echo(f"error: {error}", err=True)
        else:
            typer.echo(f"error: {type(error).__name__}: {error}\n(hf-ssm --debug COMMAND ... shows where)", err=True)
        raise typer.Exit(2 if bad_input else 1) from error


@app.command()
def train(
    recipe: Annotated[Path, typer.Argument(help="A YAML recipe, such as configs/recipes/demo.yaml.")],
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change a value of the recipe; may be given repeatedly."),
    ] = None,
    restart: Annotated[
        bool, typer.Option("--restart", help="Delete what an earlier run left in the output folder, begin anew.")
    ] = False,
) -> None:
    """Train a model as a recipe says.

    Interrupted, even by kill -9, the same command goes on from the last complete checkpoint.

    Examples:

        hf-ssm train configs/recipes/demo.yaml

        hf-ssm train configs/recipes/demo.yaml --set training.max_steps=50 --set output_dir=runs/short
    """
    with _readable_errors():
        from hf_ssm.objectives import objective_of
        from hf_ssm.recipes import load_recipe
        from hf_ssm.training import train as run

        what = load_recipe(recipe, changes or [])
        result = run(what, restart=restart)
        typer.echo(objective_of(what).summary(result.metrics))
        typer.echo(f"model: {result.model_folder}   report: {result.folder / 'report.md'}")


@app.command()
def generate(
    model: Annotated[str, typer.Argument(help="Folder of a saved model, or its name on the Hub.")],
    prompt: Annotated[str, typer.Argument(help="Text to continue; - reads it from standard input.")],
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Stop after so many tokens.")] = 128,
    temperature: Annotated[float, typer.Option(min=0, help="0 always takes the likeliest token.")] = 0.0,
    top_p: Annotated[float, typer.Option(min=0, max=1, help="Sample from the likeliest tokens of this share.")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="Makes sampling repeatable.")] = None,
    num_beams: Annotated[int, typer.Option(min=1, help="Beam search; the text appears at the end.")] = 1,
    state: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Go on from what `hf-ssm state save` has written.")
    ] = None,
) -> None:
    """Continue a prompt; the continuation is printed as it is made.

    Examples:

        hf-ssm generate runs/demo/model "def main():"

        hf-ssm generate runs/demo/model --state book.safetensors "And so"

        hf-ssm generate runs/demo/model - --temperature 0.8 --seed 1 < unfinished.py
    """
    with _readable_errors():
        text = sys.stdin.read() if prompt == "-" else prompt
        if not text:
            raise ValueError("the prompt is empty; give the model at least one character to continue")
        if temperature == 0 and top_p < 1:
            raise ValueError(
                "--top-p chooses what is sampled from, and nothing is at temperature 0: add --temperature"
            )

        from transformers import TextStreamer, set_seed

        network, tokenizer = _load(model)
        how: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": temperature > 0, "num_beams": num_beams}
        if temperature > 0:
            how |= {"temperature": temperature, "top_p": top_p}
        if num_beams == 1:
            how["streamer"] = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
        if seed is not None:
            set_seed(seed)
        inputs = tokenizer(
            text, return_tensors="pt", return_token_type_ids=False, add_special_tokens=state is None
        ).to(network.device)
        if state is not None:
            from hf_ssm.state_files import load_cache

            cache = load_cache(state, network)
            if cache.batch_size > 1:
                raise ValueError(f"{state} holds {cache.batch_size} texts; this command goes on from one")
            mask = inputs["attention_mask"]  # of all tokens: tells that the prompt's are new, however many there are
            inputs["attention_mask"] = mask.new_ones(1, cache.get_seq_length() + mask.shape[1])
            cache.batch_repeat_interleave(num_beams)
            how["past_key_values"] = cache
        output = network.generate(**inputs, **how)
        if num_beams > 1:
            typer.echo(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))


def _load(model: str) -> tuple[Any, Any]:
    """A model that generates, on the device that is fastest here, and its tokenizer; ValueError if there is none."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    from hf_ssm import registry

    if not Path(model).exists() and (model.startswith(("/", ".", "~")) or model.count("/") > 1):
        raise FileNotFoundError(f"no such folder: {model}")
    try:
        model_type = AutoConfig.from_pretrained(model).model_type
        known = registry.ARCHITECTURES.get(model_type)
        if known is not None and "AutoModelForCausalLM" not in known.models:
            raise ValueError(f"a {model_type} model is an encoder, it does not generate; it can fill masks")
        network: Any = AutoModelForCausalLM.from_pretrained(model)
        tokenizer: Any = AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError) as error:  # no model there, neither in a folder nor on the Hub
        from hf_ssm.hub import connection_broke

        if connection_broke(error):
            raise ConnectionError(
                f"cannot load {model}: the connection broke; the same command goes on with what is missing"
            ) from error
        raise ValueError(f"cannot load {model}: {error}") from error
    return network.to(torch.accelerator.current_accelerator() or "cpu").eval(), tokenizer


@state_app.command("save")
def save_state(
    model: Annotated[str, typer.Argument(help="Folder of a saved model, or its name on the Hub.")],
    text: Annotated[str, typer.Argument(help="A text, or the file that it is in; - reads standard input.")],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="The .safetensors file to write.")],
) -> None:
    """Read a long text once and keep what the model remembers of it; `hf-ssm generate --state` goes on from there.

    The file's size does not depend on the text's length, but for layers of Hymba that see all tokens. It belongs to
    this very model, and says so.

    Examples:

        hf-ssm state save runs/demo/model book.txt -o book.safetensors

        hf-ssm generate runs/demo/model --state book.safetensors "And so"
    """
    with _readable_errors():
        if text == "-":
            text = sys.stdin.read()
        elif os.path.isfile(text):
            text = Path(text).read_text(encoding="utf-8")
        elif Path(text).suffix and not any(character.isspace() for character in text):
            raise FileNotFoundError(f"no such file: {text}")
        if not text:
            raise ValueError("the text is empty; there is nothing to remember")
        if not output.parent.is_dir():  # to be known before the text is read
            raise FileNotFoundError(f"no such folder: {output.parent}")

        from hf_ssm.state_files import prefill, save_cache

        network, tokenizer = _load(model)
        inputs = tokenizer(text, return_tensors="pt", return_attention_mask=False, verbose=False)
        cache = prefill(network, inputs["input_ids"].to(network.device))
        save_cache(cache, output, network)
        size = output.stat().st_size / 1e6
        typer.echo(f"written: {output}, {size:.1f} MB, the state after {cache.get_seq_length():,} tokens")


@app.command()
def convert(
    source: Annotated[Path, typer.Argument(metavar="SRC", help="Folder of a checkpoint, or file of Hydra's.")],
    destination: Annotated[Path, typer.Argument(metavar="DST", help="Folder to write.")],
    to: Annotated[
        Format, typer.Option(help="hf: transformers' layout; original: that of the authors' code.")
    ] = Format.hf,
    dtype: Annotated[str | None, typer.Option(help="Store weights as float32, bfloat16 or float16.")] = None,
) -> None:
    """Convert a checkpoint between the authors' layout and that of transformers.

    Examples:

        hf-ssm convert mamba2-130m mamba2-130m-hf

        hf-ssm convert mamba2-130m-hf mamba2-130m --to original

        hf-ssm convert latest-rank0.pt hydra
    """
    with _readable_errors():
        from hf_ssm.convert import convert as run

        typer.echo(f"written: {run(source, destination, to=to.value, dtype=dtype)}")


@app.command()
def push(
    folder: Annotated[Path, typer.Argument(help="Folder of a saved model.")],
    repo: Annotated[str, typer.Argument(help="Its name on the Hub, OWNER/NAME; made if it does not exist.")],
    private: Annotated[bool, typer.Option("--private", help="Make the repository private.")] = False,
    code: Annotated[
        bool, typer.Option("--code", help="Publish the model's code, too, for those who use trust_remote_code=True.")
    ] = False,
    revision: Annotated[
        str | None, typer.Option(metavar="BRANCH", help="Publish to this branch, not to main.")
    ] = None,
    license: Annotated[
        str | None, typer.Option(metavar="ID", help="Such as apache-2.0; needed if the folder's card has none.")
    ] = None,
    base_model: Annotated[
        str | None, typer.Option(metavar="NAME", help="What it was made from, if the card is written here.")
    ] = None,
) -> None:
    """Publish a model on the Hub: weights, configuration, tokenizer, and a model card.

    If the folder has no card (README.md), one is written of what is known. All appears in one commit; interrupted, the
    same command goes on. It writes as HF_TOKEN or `hf auth login` say, to HF_ENDPOINT.

    Examples:

        hf-ssm push runs/demo/model me/demo --private

        hf-ssm push mamba2-130m-hf me/mamba2-130m --code --license apache-2.0
    """
    with _readable_errors():
        from hf_ssm.hub import push as run

        url = run(
            folder,
            repo,
            private=private,
            code=code,
            revision=revision,
            license=license,
            base_model=base_model,
        )
        typer.echo(f"published: {url}")


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
    cache: Annotated[
        str | None,
        typer.Option(
            metavar="CONFIG", help="Instead: how large this model's cache is. A config.json, folder or name."
        ),
    ] = None,
    context: Annotated[int, typer.Option(metavar="TOKENS", help="For --cache.")] = 8192,
) -> None:
    """Show what is installed, and which backend each operator will use here and why.

    Examples:

        hf-ssm doctor

        hf-ssm doctor --cache nvidia/Hymba-1.5B-Base --context 8192
    """
    with _readable_errors():
        from hf_ssm import doctor as module

        if cache is not None:
            from dataclasses import asdict

            from transformers import AutoConfig

            sizes, full = module.cache_sizes(AutoConfig.from_pretrained(cache), context)
            if as_json:
                typer.echo(json.dumps({"layers": [asdict(size) for size in sizes], "full_attention": full}, indent=1))
            else:
                module.show_cache(sizes, full, context)
            return
        report = module.examine()
        if as_json:
            typer.echo(json.dumps(report, indent=1))
        else:
            module.show(report)


def main() -> None:
    """Entry point of the `hf-ssm` command."""
    app()


if __name__ == "__main__":
    main()
