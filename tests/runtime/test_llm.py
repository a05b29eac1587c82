"""The public API: whole answers, chats, options and errors."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from inferencex.formats.errors import BackendError, BundleError, OptionError, RequestError
from inferencex.runtime import LLM, RequestOutput, SamplingParams
from inferencex.runtime.backends import backend_names, load_backend, select_backend

PARAMS = SamplingParams(temperature=0.0, max_tokens=10)


def whole(llm: LLM) -> bool:
    llm.engine.check_integrity()
    return not llm.shared._inboxes and not llm.engine.has_unfinished and llm.stats.kv_blocks_used == 0


def test_prompts_of_every_form(text_bundle: Path, hash_backend: Any) -> None:
    llm = LLM(text_bundle, backend=hash_backend)
    ids = llm.require_tokenizer().encode("the cat")
    one, of_list, of_ids, of_id_lists = (llm.generate(p, PARAMS) for p in ("the cat", ["the cat"], ids, [ids]))
    for results in (one, of_list, of_ids, of_id_lists):
        [result] = results
        assert result.prompt_token_ids == tuple(ids)
        assert list(result.outputs[0].token_ids) == hash_backend.model.greedy(ids, 10)
        assert result.outputs[0].text == llm.require_tokenizer().decode(result.outputs[0].token_ids)
        assert result.outputs[0].finish_reason == "length"
    assert (one[0].prompt, of_ids[0].prompt) == ("the cat", None)
    assert llm.generate([]) == []
    assert whole(llm)


def test_results_come_in_order_and_are_announced_as_they_finish(text_bundle: Path, hash_backend: Any) -> None:
    llm = LLM(text_bundle, backend=hash_backend, max_num_seqs=2, max_num_batched_tokens=3)
    prompts = ["the", "cat sat", "on the mat", "日本語", "🙂"]
    params = [SamplingParams(temperature=0.0, max_tokens=12 - 2 * index) for index in range(5)]
    announced: dict[int, RequestOutput] = {}
    results = llm.generate(prompts, params, on_finished=announced.__setitem__)
    assert [result.prompt for result in results] == prompts
    assert [len(result.outputs[0].token_ids) for result in results] == [12, 10, 8, 6, 4]
    assert announced == dict(enumerate(results))
    assert list(announced) != [0, 1, 2, 3, 4]


def test_a_bundle_without_a_tokenizer_takes_token_ids(text_bundle: Path, hash_backend: Any, tmp_path: Path) -> None:
    folder = tmp_path / "bundle"
    shutil.copytree(text_bundle, folder)
    (folder / "tokenizer.json").unlink()
    llm = LLM(folder, backend=hash_backend)
    assert llm.tokenizer is None and not llm.chat_template
    [result] = llm.generate([5, 6, 7], PARAMS)
    assert list(result.outputs[0].token_ids) == hash_backend.model.greedy([5, 6, 7], 10)
    assert result.outputs[0].text == "" and result.prompt is None
    end = result.outputs[0].token_ids[3]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [end]}))
    [stopped] = LLM(folder, backend=hash_backend).generate([[5, 6, 7]], PARAMS)
    assert stopped.outputs[0].finish_reason == "stop"
    assert len(stopped.outputs[0].token_ids) == 1 + result.outputs[0].token_ids.index(end)
    with pytest.raises(RequestError, match=r"has no tokenizer \(tokenizer.json\)"):
        llm.generate("the cat")
    with pytest.raises(RequestError, match="has no tokenizer"):
        llm.chat([{"role": "user", "content": "the cat?"}])
    with pytest.raises(RequestError, match="has no tokenizer"):
        llm.stream_chat([{"role": "user", "content": "the cat?"}])
    with pytest.raises(RequestError, match="the bundle has no tokenizer; use stop_token_ids"):
        llm.generate([5], SamplingParams(stop="x"))
    assert whole(llm)


def test_priorities(text_bundle: Path, hash_backend: Any) -> None:
    llm = LLM(text_bundle, backend=hash_backend, max_num_seqs=1, scheduling_policy="priority")
    order: list[int] = []
    llm.generate(["a", "b", "c"], PARAMS, priority=[2, 1, 0], on_finished=lambda place, _: order.append(place))
    assert order == [2, 1, 0]


def test_chat_renders_the_template_once(text_bundle: Path, hash_backend: Any) -> None:
    llm = LLM(text_bundle, backend=hash_backend)
    question = [{"role": "user", "content": "the cat?"}]
    rendered = "<|user|>the cat?<|assistant|>"
    [answer] = llm.chat(question, PARAMS)
    assert answer.prompt == rendered
    assert list(answer.prompt_token_ids) == llm.require_tokenizer().encode(rendered, add_special_tokens=False)
    assert [a.outputs[0].text for a in llm.chat([question, question], PARAMS)] == [answer.outputs[0].text] * 2
    assert "".join(delta.text for delta in llm.stream_chat(question, PARAMS)) == answer.outputs[0].text
    assert whole(llm)


def test_the_models_defaults_fill_what_is_not_set(text_bundle: Path, hash_backend: Any, tmp_path: Path) -> None:
    folder = tmp_path / "bundle"
    shutil.copytree(text_bundle, folder)
    greedy = LLM(folder, backend=hash_backend)
    assert len({greedy.generate("the", SamplingParams(max_tokens=8))[0].outputs[0].text for _ in range(3)}) == 1
    config = {"do_sample": True, "temperature": 0.7, "top_p": 0.9, "max_new_tokens": 7, "eos_token_id": [0]}
    (folder / "generation_config.json").write_text(json.dumps(config))
    sampled = LLM(folder, backend=hash_backend)
    texts = {sampled.generate("the", SamplingParams(ignore_eos=True))[0].outputs[0].token_ids for _ in range(3)}
    assert len(texts) == 3 and {len(tokens) for tokens in texts} == {7}
    config["top_p"] = 1.5
    (folder / "generation_config.json").write_text(json.dumps(config))
    with pytest.raises(BundleError, match=r"generation_config.json: top_p is 1.5"):
        LLM(folder, backend=hash_backend)


def test_one_bad_prompt_is_refused_before_anything_runs(text_bundle: Path, hash_backend: Any) -> None:
    llm = LLM(text_bundle, backend=hash_backend, max_model_len=20)
    for prompts, params in (
        (["the", ""], PARAMS),
        (["the", [1] * 11], PARAMS),
        (["the", [10**6]], PARAMS),
        (["the", "cat"], [PARAMS]),
        (["the", 5.0], PARAMS),
    ):
        with pytest.raises(RequestError):
            llm.generate(prompts, params)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match=r"11 prompt tokens \+ max_tokens=10 make 21 tokens, .* context of 20"):
        llm.stream([1] * 11, PARAMS)
    assert hash_backend.model.batches == [] and whole(llm)
    assert len(llm.generate([1] * 11)[0].outputs[0].token_ids) <= 9


def test_a_failing_step_frees_everything(text_bundle: Path, hash_backend: Any) -> None:
    llm = LLM(text_bundle, backend=hash_backend)

    def explode(batch: Any) -> None:
        if len(hash_backend.model.batches) == 4:
            raise KeyboardInterrupt

    bystander = llm.stream("the mat", PARAMS)
    next(bystander)
    hash_backend.model.before_step = explode
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["the", "cat"], PARAMS)
    with pytest.raises(BackendError, match="KeyboardInterrupt"):
        list(bystander)
    assert whole(llm)
    assert llm.generate("the", PARAMS)[0].outputs[0].finish_reason == "length"


def test_logits_that_are_not_finite_are_an_error(text_bundle: Path, hash_backend: Any) -> None:
    llm = LLM(text_bundle, backend=hash_backend)
    hash_backend.model.transform = lambda context, logits: logits * float("nan") if len(context) > 5 else logits
    with pytest.raises(BackendError, match="not finite"):
        llm.generate(["the", "the cat"], PARAMS)
    assert whole(llm)


def test_threads_share_the_batch(text_bundle: Path, hash_backend: Any) -> None:
    llm = LLM(text_bundle, backend=hash_backend)
    prompts = ["the", "cat", "sat", "on"]
    expected = [result.outputs[0].text for result in llm.generate(prompts, PARAMS)]
    found: dict[int, str] = {}

    def work(place: int) -> None:
        if place % 2:
            found[place] = "".join(delta.text for delta in llm.stream(prompts[place], PARAMS))
        else:
            found[place] = llm.generate(prompts[place], PARAMS)[0].outputs[0].text

    threads = [threading.Thread(target=work, args=(place,)) for place in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert [found[place] for place in range(4)] == expected
    assert whole(llm)


def test_statistics(text_bundle: Path, hash_backend: Any) -> None:
    llm = LLM(text_bundle, backend=hash_backend, num_kv_blocks=30, block_size=4)
    [result] = llm.generate([[1] * 12], PARAMS)
    stats = llm.stats
    assert (stats.num_kv_blocks, stats.kv_blocks_peak, stats.kv_blocks_used) == (30, 6, 0)
    assert stats.num_prefill_tokens == 12 and stats.num_decode_tokens == 9
    assert stats.prefill_tokens_per_second and stats.decode_tokens_per_second and stats.mean_time_to_first_token
    assert result.metrics.time_to_first_token and result.metrics.decode_tokens_per_second


def test_size_of_the_kv_cache(text_bundle: Path, hash_backend: Any) -> None:
    assert LLM(text_bundle, backend=hash_backend, max_num_seqs=3).stats.num_kv_blocks == 3 * 256 // 16
    assert LLM(text_bundle, backend=hash_backend, max_num_seqs=3, max_model_len=17).stats.num_kv_blocks == 6
    assert LLM(text_bundle, backend=hash_backend, kv_cache_memory=10 * 16 * 4 + 1).stats.num_kv_blocks == 10
    for options, message in (
        ({"kv_cache_memory": 63}, "kv_cache_memory=63 bytes hold no block.*64 bytes"),
        ({"kv_cache_memory": 1, "num_kv_blocks": 1}, "give one of them"),
        ({"max_model_len": 257}, "257.*256"),
        ({"block_size": 0}, "block_size=0"),
        ({"scheduling_policy": "lifo"}, "lifo"),
        ({"num_kv_blocks": 10**12}, "num_kv_blocks=1000000000000.*at most 67108864"),
    ):
        with pytest.raises(OptionError, match=message):
            LLM(text_bundle, backend=hash_backend, **options)


@pytest.mark.parametrize(
    "option",
    [
        "max_model_len",
        "max_num_seqs",
        "max_num_batched_tokens",
        "kv_cache_memory",
        "num_kv_blocks",
        "block_size",
        "threads",
    ],
)
@pytest.mark.parametrize("value", [0, -3, 1.5, "8", True, float("nan")])
def test_counts_that_are_no_positive_integers_are_refused(
    text_bundle: Path, hash_backend: Any, option: str, value: Any
) -> None:
    with pytest.raises(OptionError, match=f"{option}={value!r}; "):
        LLM(text_bundle, backend=hash_backend, **{option: value})


def test_more_threads_than_any_library_bears_are_refused(text_bundle: Path, hash_backend: Any) -> None:
    with pytest.raises(OptionError, match="threads=1000000; at most 1024"):
        LLM(text_bundle, backend=hash_backend, threads=10**6)
    with pytest.raises(OptionError, match="pin='x'; expected True or False"):
        LLM(text_bundle, backend=hash_backend, pin="x")  # type: ignore[arg-type]


def test_a_bundle_that_is_no_folder_is_called_that(tmp_path: Path, hash_backend: Any) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "absent", tmp_path / "file"):
        with pytest.raises(BundleError, match=f"{path}: is not a folder"):
            LLM(path, backend=hash_backend)


@pytest.mark.parametrize("prompts", [None, 5, b"bytes", bytearray(b"bytes"), [b"bytes"], [None], [[1.5]], [["a"]]])
def test_prompts_of_no_known_form_are_refused(text_bundle: Path, hash_backend: Any, prompts: Any) -> None:
    llm = LLM(text_bundle, backend=hash_backend)
    with pytest.raises(RequestError, match="expected a text"):
        llm.generate(prompts, PARAMS)
    assert whole(llm)


def test_parameters_and_priorities_of_wrong_types_are_refused(text_bundle: Path, hash_backend: Any) -> None:
    llm = LLM(text_bundle, backend=hash_backend)
    with pytest.raises(RequestError, match=r"max_tokens.*expected SamplingParams"):
        llm.generate("the", {"max_tokens": 3})  # type: ignore[arg-type]
    for priority in (None, 1.5, True, "x"):
        with pytest.raises(RequestError, match=r"priority is .*; expected an integer|1 priority for 1"):
            llm.generate("the", PARAMS, priority=[priority])  # type: ignore[list-item]
    assert whole(llm)


def test_backends_are_found_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "reference" in backend_names()
    with pytest.raises(OptionError, match=r"'abacus'.*reference"):
        load_backend("abacus")
    monkeypatch.setattr("inferencex.runtime.backends._BACKENDS", {"reference": ("no_such_package.it", "B", "convert")})
    with pytest.raises(BackendError, match=r"'reference' needs the package 'no_such_package'.*inferencex\[convert\]"):
        load_backend("reference")
    with pytest.raises(BackendError, match=r"no backend can run this bundle here: .*no_such_package"):
        select_backend("auto", tmp_path)


def test_neither_torch_nor_transformers_is_imported() -> None:
    script = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "transformers"):
            raise ImportError(name + " is imported")

sys.meta_path.insert(0, Refuse())
from inferencex.runtime import LLM, SamplingParams, RequestOutput
import inferencex.runtime.engine.engine
assert "torch" not in sys.modules and "transformers" not in sys.modules
print(LLM.__name__, SamplingParams().n)
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, timeout=60)
    assert done.stdout.split() == ["LLM", "1"], done.stderr


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_fork_is_refused_even_while_a_thread_of_its_parent_computes(text_bundle: Path, hash_backend: Any) -> None:
    llm = LLM(text_bundle, backend=hash_backend)
    stream = llm.stream([5, 6, 7], PARAMS)
    next(stream)
    with llm.shared._lock:
        child = os.fork()
        if child == 0:
            status = 1
            try:
                llm.generate([[5, 6, 7]], PARAMS)
            except BackendError as error:
                stream.close()
                status = 0 if "does not survive a fork" in str(error) else 2
            finally:
                os._exit(status)
        assert _status_within(child, 20) == 0
    assert len(list(stream)) > 0


def _status_within(child: int, seconds: float) -> int:
    """Return the exit status of a process, which is killed when it takes longer."""
    killer = threading.Timer(seconds, os.kill, (child, signal.SIGKILL))
    killer.start()
    try:
        return os.waitpid(child, 0)[1]
    finally:
        killer.cancel()


@pytest.mark.parametrize("share", [0, -0.1, 1.5, float("nan"), "0.5", True, None])
def test_a_share_of_a_gpu_that_is_none_is_refused_on_any_device(
    text_bundle: Path, hash_backend: Any, share: Any
) -> None:
    with pytest.raises(OptionError, match=r"gpu_memory_utilization=.*expected a share above 0 and at most 1"):
        LLM(text_bundle, backend=hash_backend, gpu_memory_utilization=share)


@pytest.mark.parametrize("device", ["gpu", "cuda:1,2", 0, None])
def test_a_device_that_is_none_is_refused_whatever_the_backend(
    text_bundle: Path, hash_backend: Any, device: Any
) -> None:
    with pytest.raises(OptionError, match="expected auto, cpu, cuda, rocm"):
        LLM(text_bundle, backend=hash_backend, device=device)
