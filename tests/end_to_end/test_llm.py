"""The offline API with the real model: what people call, what comes back, and what is refused."""

import os
import signal
import threading

import numpy as np
import pytest

from pagetable import LLM, RequestError, SamplingParams
from pagetable.checkpoint import ModelError
from pagetable.memory.events import Miss, Stored

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
SYSTEM = {"role": "system", "content": "You are a helpful teacher who answers in one short sentence. " * 4}


def text_of(output) -> str:
    return output.outputs[0].text


def test_a_real_answer(whole: LLM):
    (output,) = whole.chat(
        [{"role": "user", "content": "What is the capital of France?"}], SamplingParams(temperature=0, max_tokens=32)
    )
    assert "Paris" in text_of(output)
    assert output.finished
    assert output.outputs[0].finish_reason == "stop"
    assert output.outputs[0].token_ids[-1] in whole.tokenizer.eos_token_ids
    assert output.metrics.time_to_first_token > 0


def test_prompts_in_every_form_give_the_same_answer(whole: LLM):
    text = "The three primary colors are"
    tokens = whole.tokenizer.encode(text)
    forms = [text, tokens, {"prompt": text}, {"prompt_token_ids": tokens}, {"prompt": text, "cache_salt": "x"}]
    outputs = [whole.generate(form, GREEDY)[0] for form in forms]
    assert len({text_of(output) for output in outputs}) == 1
    assert outputs[0].prompt == text
    assert outputs[1].prompt is None
    assert [text_of(output) for output in whole.generate(forms, GREEDY)] == [text_of(outputs[0])] * len(forms)


def test_outputs_come_in_the_order_of_prompts_with_params_of_their_own(whole: LLM):
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (9, 3, 6)]
    outputs = whole.generate(["One", "Two", "Three"], params)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [9, 3, 6]
    assert [output.prompt for output in outputs] == ["One", "Two", "Three"]
    assert whole.generate([], GREEDY) == []


def test_a_shared_system_prompt_is_computed_once(whole: LLM):
    whole.reset_prefix_cache()
    chats = [[SYSTEM, {"role": "user", "content": f"What is {i} plus {i}?"}] for i in range(4)]
    before = whole.stats()
    outputs = whole.chat(chats, GREEDY)
    assert outputs[0].num_cached_tokens == 0
    assert all(output.num_cached_tokens >= 48 for output in outputs[1:])
    assert whole.stats().hit_tokens - before.hit_tokens == sum(output.num_cached_tokens for output in outputs)


def test_n_answers_share_the_prompt_and_differ(whole: LLM):
    whole.reset_prefix_cache()
    prompt = "Once upon a time there was a little house at the edge of a dark forest, and in it there lived"
    before = whole.stats()
    (output,) = whole.generate(prompt, SamplingParams(n=4, temperature=1.0, seed=5, max_tokens=12))
    assert [answer.index for answer in output.outputs] == [0, 1, 2, 3]
    assert len({answer.text for answer in output.outputs}) > 1
    assert whole.stats().hit_tokens - before.hit_tokens == 3 * 16
    (again,) = whole.generate(prompt, SamplingParams(n=4, temperature=1.0, seed=5, max_tokens=12))
    assert [answer.text for answer in again.outputs] == [answer.text for answer in output.outputs]


def test_a_seeded_answer_does_not_depend_on_its_neighbours(whole: LLM):
    seeded = SamplingParams(temperature=1.0, seed=42, max_tokens=10)
    alone = text_of(whole.generate("My favourite food is", seeded)[0])
    crowd = whole.generate(["A", "My favourite food is", "B b", "C c c"], [GREEDY, seeded, GREEDY, GREEDY])
    assert text_of(crowd[1]) == alone


def test_unseeded_answers_differ_from_each_other(whole: LLM):
    outputs = whole.generate(["My favourite food is"] * 3, SamplingParams(temperature=1.5, max_tokens=12))
    assert len({text_of(output) for output in outputs}) > 1


def test_stop_texts_end_the_answer_and_are_not_part_of_it(whole: LLM):
    free = text_of(whole.generate("Count: one, two, three,", SamplingParams(temperature=0, max_tokens=20))[0])
    stop = free[4:9]
    (output,) = whole.generate("Count: one, two, three,", SamplingParams(temperature=0, max_tokens=20, stop=stop))
    assert text_of(output) == free[: free.index(stop)]
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", stop)
    assert len(output.outputs[0].token_ids) < 20


def test_logprobs_hold_the_drawn_token_first(whole: LLM):
    (output,) = whole.generate("The sky is", SamplingParams(temperature=0, max_tokens=4, logprobs=3))
    answer = output.outputs[0]
    assert len(answer.logprobs) == len(answer.token_ids) == 4
    for token_id, entry in zip(answer.token_ids, answer.logprobs, strict=True):
        assert next(iter(entry)) == token_id
        assert entry[token_id].rank == 1
        assert len(entry) == 3
        assert all(value.logprob <= entry[token_id].logprob for value in entry.values())
    assert answer.cumulative_logprob == pytest.approx(
        sum(entry[token_id].logprob for token_id, entry in zip(answer.token_ids, answer.logprobs, strict=True))
    )
    assert whole.generate("The sky is", GREEDY)[0].outputs[0].logprobs is None


def test_a_stream_adds_up_to_the_answer(whole: LLM):
    pieces = list(whole.stream("The sky is", GREEDY))
    assert "".join(piece.outputs[0].new_text for piece in pieces) == text_of(pieces[-1])
    assert text_of(pieces[-1]) == text_of(whole.generate("The sky is", GREEDY)[0])
    assert [piece.finished for piece in pieces].count(True) == 1
    assert len(pieces) == 8


def test_streams_interleave(whole: LLM):
    a, b = whole.stream("The sky is", GREEDY), whole.stream("Water is", GREEDY)
    both = [list(pair) for pair in zip(a, b, strict=True)][-1]
    assert [text_of(output) for output in both] == [
        text_of(output) for output in whole.generate(["The sky is", "Water is"], GREEDY)
    ]


def test_a_stream_that_is_dropped_gives_its_blocks_back(whole: LLM):
    stream = whole.stream(["The sky is", "Water is"], SamplingParams(max_tokens=500))
    next(stream)
    assert whole.stats().blocks_in_use > 0
    stream.close()
    assert whole.stats().blocks_in_use == 0


def test_a_stream_that_was_never_read_gives_its_blocks_back(whole: LLM):
    whole.stream("The sky is", GREEDY).close()
    assert not whole.engine.scheduler.has_unfinished
    stream = whole.stream("The sky is", GREEDY)
    del stream
    assert not whole.engine.scheduler.has_unfinished


def test_a_stream_that_is_collected_in_the_middle_of_a_step_is_ended_after_it(whole: LLM):
    stream = whole.stream("The sky is", SamplingParams(max_tokens=500))
    next(stream)
    with whole._bookkeeping():
        stream.close()
        assert whole.engine.scheduler.has_unfinished
    assert not whole.engine.scheduler.has_unfinished


def test_ctrl_c_leaves_the_engine_clean(whole: LLM):
    class Interrupted:
        """Ctrl-C arrives in the middle of the third step."""

        def __init__(self, runner) -> None:
            self.runner, self.steps = runner, 0

        def execute(self, step):
            self.steps += 1
            if self.steps == 3:
                os.kill(os.getpid(), signal.SIGINT)
            return self.runner.execute(step)

    runner = whole.engine.runner
    whole.engine.runner = Interrupted(runner)
    try:
        with pytest.raises(KeyboardInterrupt):
            whole.generate(["The sky is"] * 4, SamplingParams(max_tokens=5000, ignore_eos=True, temperature=0))
        assert whole.engine.runner.steps == 3
    finally:
        whole.engine.runner = runner
    whole.block_manager.check()
    assert whole.stats().blocks_in_use == 0
    assert len(whole.generate("The sky is", GREEDY)[0].outputs[0].token_ids) == 8


def test_threads_share_one_engine(whole: LLM):
    expected = [text_of(output) for output in whole.generate(["One", "Two", "Three"], GREEDY)]
    texts: dict[int, str] = {}

    def ask(i: int, prompt: str) -> None:
        texts[i] = text_of(whole.generate(prompt, GREEDY)[0])

    threads = [threading.Thread(target=ask, args=pair) for pair in enumerate(["One", "Two", "Three"])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [texts[i] for i in range(3)] == expected


def test_salts_isolate_and_sharing_is_shown_to_work(whole: LLM):
    whole.reset_prefix_cache()
    prompt = "A secret that is long enough to fill at least one block of sixteen tokens, surely, and then some more."
    prompts = [{"prompt": prompt, "cache_salt": salt} for salt in ("alice", "alice", "bob")]
    assert [whole.generate(p, GREEDY)[0].num_cached_tokens for p in prompts] == [0, 16, 0]


def test_events_reach_the_caller():
    seen = []
    with LLM("smollm2", kv_cache_memory="64MiB", max_model_len=512, events=seen.append) as llm:
        llm.generate([[5] * 40], GREEDY)
    assert {type(event) for event in seen} >= {Miss, Stored}


def test_two_engines_live_in_one_process(whole: LLM):
    with LLM("smollm2", kv_cache_memory="64MiB", max_model_len=512, block_size=4, dtype="bfloat16") as other:
        assert text_of(other.generate("The sky is", GREEDY)[0])
        assert text_of(whole.generate("The sky is", GREEDY)[0])


def test_a_closed_engine_says_so():
    llm = LLM("smollm2", kv_cache_memory="64MiB", max_model_len=512)
    llm.close()
    llm.close()
    with pytest.raises(RuntimeError, match="closed"):
        llm.generate("x", GREEDY)


@pytest.mark.parametrize("params", [{"top_k": 2**31 - 1}, {"stop_token_ids": [2**31 - 1, 60_000], "min_tokens": 2}])
def test_one_requests_parameters_do_not_harm_its_neighbours(whole: LLM, params: dict):
    odd = SamplingParams(max_tokens=4, ignore_eos=True, temperature=0.5, **params)
    outputs = whole.generate(["The sky is", "Water is"], [odd, GREEDY])
    assert [output.outputs[0].finish_reason for output in outputs] == ["length", "length"]


def test_a_request_that_is_aborted_behind_its_streams_back_ends_it(whole: LLM):
    stream = whole.stream("The sky is", SamplingParams(max_tokens=50))
    first = next(stream)
    whole.engine.scheduler.abort(first.outputs[0].seq_id)
    (last,) = stream
    assert last.outputs[0].finish_reason == "abort"


def test_arrays_are_prompts_too(whole: LLM):
    tokens = whole.tokenizer.encode("The sky is")
    outputs = whole.generate([np.array(tokens), np.array(tokens, np.int32)], GREEDY)
    assert text_of(outputs[0]) == text_of(outputs[1]) == text_of(whole.generate(np.array(tokens), GREEDY)[0])


# ------------------------------------------------------------------ bad input costs nothing else


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        ("", "no tokens"),
        ([[]], "no tokens"),
        ([[1] * 9000], "max_model_len=8192"),
        ([[49152]], "49152 is not in the vocabulary"),
        ([[-1]], "-1 is out of range"),
        ([[1.5]], "integers"),
        ([None], "'NoneType'|integers|iterable"),
        ({"text": "x"}, "'prompt' or 'prompt_token_ids'"),
        ({"prompt": "x", "cache_salt": ""}, "cache_salt"),
        ({"prompt": 5}, "string"),
        ("\ud800", "surrogate"),
        (b"abc", "bytes|abc"),
        ({1, 2}, "expected"),
        (None, "None"),
        (7, "7"),
    ],
)
def test_a_bad_prompt_is_refused(whole: LLM, prompt: object, says: str):
    with pytest.raises(RequestError, match=says):
        whole.generate(prompt, GREEDY)


def test_one_bad_prompt_among_many_is_refused_before_any_is_queued(whole: LLM):
    with pytest.raises(RequestError, match="max_model_len"):
        whole.generate([[1, 2, 3], [1] * 9000, [4, 5]], GREEDY)
    assert not whole.engine.scheduler.has_unfinished


def test_lists_of_unequal_length_are_refused(whole: LLM):
    with pytest.raises(RequestError, match="2 entries for 3 prompts"):
        whole.generate(["a", "b", "c"], [GREEDY, GREEDY])
    with pytest.raises(RequestError, match="sampling_params"):
        whole.generate(["a"], {"temperature": 0})
    with pytest.raises(RequestError, match="0 entries for 1 prompts"):
        whole.generate(["a"], [])


def test_options_of_vllm_are_taken_at_harmless_values_and_refused_otherwise():
    with LLM(
        "smollm2",
        kv_cache_memory="64MiB",
        max_model_len=512,
        tensor_parallel_size=1,
        enforce_eager=True,
        gpu_memory_utilization=0.8,
        trust_remote_code=False,
        swap_space=4,
    ):
        pass
    with pytest.raises(ValueError, match="tensor_parallel_size=2"):
        LLM("smollm2", tensor_parallel_size=2)
    with pytest.raises(TypeError, match="tensor_paralel"):
        LLM("smollm2", tensor_paralel_size=1)


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({"model": "smollm3"}, "smollm3"),
        ({"dtype": "float8"}, "float8"),
        ({"device": "cuda"}, "no GPU"),
        ({"device": "toaster"}, "toaster"),
        ({"block_size": 12}, "power of two"),
        ({"kv_cache_memory": "much"}, "much"),
        ({"kv_cache_memory": 1000}, "holds no block"),
        ({"kv_cache_memory": 1.5}, "share"),
        ({"max_model_len": 9000}, "8192"),
        ({"max_num_seqs": 0}, "max_num_seqs=0"),
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens=0"),
        ({"eviction_policy": "mru"}, "mru"),
        ({"scheduling_policy": "lifo"}, "lifo"),
        ({"threads": 0}, "threads=0"),
        ({"block_size": 0}, "block_size=0"),
        ({"kv_cache_memory": "999TiB"}, "cannot be had"),
        ({"model": "~nosuchuser/x"}, "nosuchuser"),
    ],
)
def test_bad_arguments_are_named(how: dict, says: str):
    import torch

    if how.get("device") == "cuda" and torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    with pytest.raises(ValueError, match=says):
        LLM(**({"model": "smollm2", "kv_cache_memory": "64MiB", "max_model_len": 512} | how))


def test_a_pool_smaller_than_the_model_warns_and_a_request_that_outgrows_it_ends():
    with pytest.warns(UserWarning, match="KV cache holds 64 tokens"):
        llm = LLM("smollm2", kv_cache_memory=46_080 * 64)
    with llm:
        (output,) = llm.generate([[5] * 40], SamplingParams(temperature=0, max_tokens=None, ignore_eos=True))
        assert output.outputs[0].finish_reason == "cache_full"
        assert len(output.outputs[0].token_ids) == 25
        with pytest.raises(RequestError, match="KV cache holds 64"):
            llm.generate([[5] * 65], GREEDY)
        assert llm.stats().blocks_in_use == 0


class Failing:
    def __init__(self, runner, times: int) -> None:
        self.runner, self.times = runner, times

    def execute(self, step):
        if self.times:
            self.times -= 1
            raise MemoryError("no memory for activations")
        return self.runner.execute(step)


@pytest.mark.parametrize(("times", "reason"), [(1, "length"), (2, "error")])
def test_the_engine_outlives_a_failing_runner(whole: LLM, times: int, reason: str):
    expected = whole.generate("The sky is", GREEDY)[0]
    engine, runner = whole.engine, whole.engine.runner
    engine.runner = Failing(runner, times)
    try:
        (output,) = whole.generate("The sky is", GREEDY)
    finally:
        engine.runner = runner
    assert output.outputs[0].finish_reason == reason
    if reason == "error":
        assert "no memory for activations" in output.outputs[0].error
    else:
        assert text_of(output) == text_of(expected)
    assert text_of(whole.generate("The sky is", GREEDY)[0]) == text_of(expected)


def test_a_broken_model_file_is_named(tmp_path):
    from pagetable.text import resolve_model

    whole_file = resolve_model("smollm2").read_bytes()
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(whole_file[: len(whole_file) // 2])
    with pytest.raises(ModelError, match=r"cut\.gguf"):
        LLM(cut)
