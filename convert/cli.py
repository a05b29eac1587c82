"""`inferencex-convert`: turn a checkpoint into a bundle."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from inferencex.cli.console import DebugOption, run_app, stderr_console

if TYPE_CHECKING:
    from inferencex.convert.report import Report

app = typer.Typer(add_completion=False)

_SOURCE, _QUANTIZATION, _CALIBRATION, _CHECKS = "Source", "Quantization", "Calibration", "Checks"


@app.command()
def convert(
    model_id: Annotated[
        str,
        typer.Option(
            help="A Hugging Face directory, a hub id, a .gguf file, or the alias smollm2-135m-instruct.",
            rich_help_panel=_SOURCE,
        ),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="Directory of the new bundle.")],
    quantization: Annotated[
        str,
        typer.Option(
            help="none; int4 (awq+gptq-int4, recommended); METHOD-TYPE[-gN] with the methods rtn, awq, gptq, awq+gptq, "
            "smoothquant, such as gptq-int8 or rtn-int4-g128; fp8, fp8-weight, int8-dynamic, nvfp4 or mxfp4.",
            rich_help_panel=_QUANTIZATION,
        ),
    ] = "none",
    group_size: Annotated[
        int | None,
        typer.Option(
            help="Input channels that share a scale; -1 for one scale per output channel. "
            "Default: 64 for INT3 to INT6 and under a budget, -1 for INT8 and FP8.",
            rich_help_panel=_QUANTIZATION,
        ),
    ] = None,
    symmetric: Annotated[
        bool | None,
        typer.Option(
            "--symmetric/--asymmetric",
            help="Whether zero is in the middle of the range. Default: INT3 to INT6, and all under a budget, "
            "asymmetric; INT8 symmetric.",
            rich_help_panel=_QUANTIZATION,
        ),
    ] = None,
    target_bits: Annotated[
        float | None,
        typer.Option(
            help="Mean bits of a weight of the linears, scales and zero points included, such as 4.5: each gets the "
            "type that keeps predictions best within them. --quantization then names the method only (awq+gptq).",
            rich_help_panel=_QUANTIZATION,
        ),
    ] = None,
    target_size: Annotated[
        str | None,
        typer.Option(help="The same for the size of the whole bundle, such as 80MB.", rich_help_panel=_QUANTIZATION),
    ] = None,
    max_kl: Annotated[
        float | None,
        typer.Option(
            help="Mean KL from the source on held-out text (nats per token), such as 0.02: the smallest bundle found "
            "that stays within it.",
            rich_help_panel=_QUANTIZATION,
        ),
    ] = None,
    lm_head: Annotated[
        str | None,
        typer.Option(help="Precision of the head: none, int8, int4, int4-g32, fp8, ...", rich_help_panel=_QUANTIZATION),
    ] = None,
    embedding: Annotated[
        str | None, typer.Option(help="Precision of the token embedding.", rich_help_panel=_QUANTIZATION)
    ] = None,
    exclude: Annotated[
        list[str] | None,
        typer.Option(
            help="Weights that stay plain, as a pattern such as '*down_proj*'; repeatable.",
            rich_help_panel=_QUANTIZATION,
        ),
    ] = None,
    dequantize: Annotated[
        bool,
        typer.Option(
            "--dequantize",
            help="Turn the weights of a quantized checkpoint into plain ones, instead of keeping them as they are.",
            rich_help_panel=_QUANTIZATION,
        ),
    ] = False,
    static_activations: Annotated[
        bool,
        typer.Option(
            "--static-activations",
            help="Give inputs that a scheme quantizes one scale, found by calibration, instead of one a token.",
            rich_help_panel=_QUANTIZATION,
        ),
    ] = False,
    kv_cache: Annotated[
        str,
        typer.Option(
            help="none, or int8 or fp8: give keys and values scales, found by calibration, with which a runtime keeps "
            "them in 8 bits.",
            rich_help_panel=_QUANTIZATION,
        ),
    ] = "none",
    effort: Annotated[
        str,
        typer.Option(
            help="fast, normal, or best, which refines the whole model against its source's predictions and takes "
            "several times as long; it costs nothing when the bundle runs.",
            rich_help_panel=_CALIBRATION,
        ),
    ] = "normal",
    calibration: Annotated[
        str | None,
        typer.Option(
            help="Text to calibrate on: files (.txt, .jsonl, .parquet; several with commas), a dataset on the hub as "
            "NAME[:CONFIG][:SPLIT], builtin (English text that comes with Python), self (text the model writes) or "
            "random. Default: builtin, for methods that calibrate.",
            rich_help_panel=_CALIBRATION,
        ),
    ] = None,
    calibration_samples: Annotated[
        int | None, typer.Option(help="Windows of that text. Default: 128.", rich_help_panel=_CALIBRATION)
    ] = None,
    calibration_length: Annotated[
        int | None, typer.Option(help="Tokens in a window. Default: 512.", rich_help_panel=_CALIBRATION)
    ] = None,
    calibration_seed: Annotated[
        int | None, typer.Option(help="Seed of the choice of windows. Default: 0.", rich_help_panel=_CALIBRATION)
    ] = None,
    work_dir: Annotated[
        Path | None,
        typer.Option(
            help="Directory for finished blocks: after an interruption the same command continues there.",
            rich_help_panel=_CALIBRATION,
        ),
    ] = None,
    dtype: Annotated[
        str,
        typer.Option(
            help="How plain weights are stored: auto (as the checkpoint has them), float32, float16, bfloat16.",
            rich_help_panel=_QUANTIZATION,
        ),
    ] = "auto",
    revision: Annotated[
        str | None, typer.Option(help="Branch, tag or commit on the hub.", rich_help_panel=_SOURCE)
    ] = None,
    trust_remote_code: Annotated[
        bool,
        typer.Option(
            "--trust-remote-code", help="Run Python code that comes with the checkpoint.", rich_help_panel=_SOURCE
        ),
    ] = False,
    allow_pickle: Annotated[
        bool,
        typer.Option("--allow-pickle", help="Read .bin weights (only tensors are unpickled).", rich_help_panel=_SOURCE),
    ] = False,
    random_weights: Annotated[
        bool,
        typer.Option(
            "--random-weights", help="Make weights up from the config alone, for benchmarks.", rich_help_panel=_SOURCE
        ),
    ] = False,
    seed: Annotated[
        int | None, typer.Option(help="Seed of --random-weights. Default: 0.", rich_help_panel=_SOURCE)
    ] = None,
    max_model_len: Annotated[
        int | None,
        typer.Option(help="Longest sequence the bundle serves. Default: what the config says, at most 131072."),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing bundle.")] = False,
    verify: Annotated[
        bool,
        typer.Option(
            "--verify/--no-verify", help="Compare the written bundle with the source.", rich_help_panel=_CHECKS
        ),
    ] = True,
    verify_limit: Annotated[
        float | None,
        typer.Option(
            help="Mean KL (nats per token) above which the conversion fails. Default: by format.",
            rich_help_panel=_CHECKS,
        ),
    ] = None,
    threads: Annotated[int | None, typer.Option(help="Threads for quantization. Default: all processors.")] = None,
    debug: DebugOption = False,
) -> None:
    """Convert a language model into a bundle that `inferencex-run` and `inferencex serve` load."""
    gc.disable()  # importing frameworks makes a million objects and no garbage
    from inferencex.convert.quantize import parse_mixed_scheme, parse_scheme
    from inferencex.convert.quantize.budget import parse_budget
    from inferencex.formats.errors import OptionError

    budget = parse_budget(target_bits=target_bits, target_size=target_size, max_kl=max_kl)
    if budget is None:
        scheme = parse_scheme(
            quantization,
            group_size=group_size,
            symmetric=symmetric,
            lm_head=lm_head,
            embedding=embedding,
            exclude=exclude or (),
            static_activations=static_activations,
        )
    elif static_activations:
        raise OptionError(f"--static-activations is for schemes that quantize activations, which {budget} does not")
    else:
        scheme = parse_mixed_scheme(
            quantization,
            group_size=group_size,
            symmetric=symmetric,
            lm_head=lm_head,
            embedding=embedding,
            exclude=exclude or (),
        )
    if dtype not in ("auto", "float32", "float16", "bfloat16"):
        raise OptionError(f"--dtype {dtype!r} is not one of auto, float32, float16, bfloat16")

    drawn = {"samples": calibration_samples, "length": calibration_length, "seed": calibration_seed}
    given: dict[str, Any] = {name: value for name, value in drawn.items() if value is not None}
    text: dict[str, Any] = {} if calibration is None else {"source": calibration}
    calibrates = calibration is not None or scheme.needs_calibration or kv_cache != "none"
    if given and not calibrates:
        raise OptionError(
            f"--calibration-{next(iter(given))} means nothing with --quantization {scheme.name}, which does not "
            "calibrate; give --calibration as well, or leave it out"
        )

    from inferencex.convert.calibrate.data import CalibrationOptions
    from inferencex.convert.pipeline import ConvertOptions
    from inferencex.convert.pipeline import convert as run
    from inferencex.convert.progress import observer

    gc.freeze()  # what was imported stays
    gc.enable()
    options = ConvertOptions(
        model_id=model_id,
        output=output,
        scheme=scheme,
        revision=revision,
        dtype=dtype,
        max_model_len=max_model_len,
        overwrite=overwrite,
        trust_remote_code=trust_remote_code,
        allow_pickle=allow_pickle,
        random_weights=random_weights,
        seed=seed,
        dequantize=dequantize,
        verify=verify,
        verify_limit=verify_limit,
        threads=threads,
        calibration=CalibrationOptions(**text, **given) if calibrates else None,
        work_dir=work_dir,
        effort=effort,
        kv_cache=kv_cache,
        budget=budget,
    )
    with observer(stderr_console()) as watching:
        report = run(options, watching)
    _summarize(report, output)


def _summarize(report: Report, output: Path) -> None:
    from inferencex.convert.report import size

    console = stderr_console()
    total = sum(report.seconds.values())
    console.print(f"{output}: {size(report.source_bytes)} -> {size(report.bundle_bytes)} in {total:.1f} s")
    if report.mixed is not None:
        console.print(
            f"{report.mixed['bits']:.3f} bits a weight in {len(report.mixed['formats'])} formats, mean KL expected "
            f"{report.mixed['expected_kl']:.3g}"
        )
    if report.fidelity is not None:
        f = report.fidelity
        console.print(
            f"against the source: mean KL {f.mean_kl:.3g}, same top-1 {f.same_top1:.1%} over {f.tokens} tokens"
        )
    if report.held_out is not None:
        h = report.held_out
        console.print(
            f"on held-out text: mean KL {h.mean_kl:.3g}, p99 {h.p99_kl:.3g}, same top-1 {h.same_top1:.1%}, perplexity "
            f"{h.source_perplexity:.2f} -> {h.bundle_perplexity:.2f}"
        )
    console.print(f"details: {output / 'report.md'}")


def main() -> None:
    """Run `inferencex-convert`."""
    run_app(app, "inferencex-convert", extra="convert")
