"""The tests of hf.py, against transformers. All are slow: make slow installs what they need."""

import dataclasses
import json
import math
import os
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import checkpoint as checkpoints
import data as data_file
import eval as ask
import generate
import hf
import tasks
from model import GPT, GPTConfig
from test_all import (
    HERE,
    assert_close,
    cases,
    evaluated,
    refuses,
    resume,
    script,
    shaken,
    some_ids,
)

TEXT = "def main():\n    return [x ** 2 for x in range(10)]  # naïve 数 \t\n\n" * 20


# --- config.json: needs no package ---------------------------------------------------------------

PLAIN = dict(
    model_type="llama", num_hidden_layers=2, num_attention_heads=4, hidden_size=32, vocab_size=64,
    intermediate_size=48, rms_norm_eps=1e-5, max_position_embeddings=64, architectures=["A"],
)  # fmt: skip
LLAMA3 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)


@cases("keys, expected", [
    ({}, dict(residual="prenorm", n_kv_head=4, rope_base=10000.0, qk_norm=False, bias=False)),
    (dict(attention_bias=True), dict(attn_bias="all", bias=False)),
    (dict(mlp_bias=True), dict(attn_bias="none", bias=True)),
    (dict(rope_theta=5e5, rope_scaling=LLAMA3 | dict(original_max_position_embeddings=16)),
     dict(rope_base=5e5, rope_scaling=(8.0, 1.0, 4.0, 16))),
    (dict(rope_scaling=dict(type="linear", factor=2.0)), dict(rope_scaling=(2.0,))),
    (dict(rope_parameters=dict(rope_type="default", rope_theta=7.0)), dict(rope_base=7.0)),
    (dict(model_type="mistral", num_key_value_heads=2, head_dim=10, sliding_window=64),
     dict(n_kv_head=2, head_dim=10)),
    (dict(model_type="qwen2", num_key_value_heads=2, sliding_window=4, use_sliding_window=False),
     dict(attn_bias="qkv")),
    (dict(model_type="qwen3", num_key_value_heads=2, head_dim=6), dict(qk_norm=True)),
    (dict(model_type="olmo2"), dict(residual="outnorm", qk_norm_joint=True)),
    (dict(max_sequence_length=64, max_length=20, temperature=0.9, top_p=0.6, do_sample=True,
          partial_rotary_factor=1.0), dict(residual="prenorm", rope_scaling=None)),
])  # fmt: skip
def test_config_json_becomes_settings(keys, expected):
    found = dataclasses.asdict(hf.to_settings(PLAIN | keys))
    assert {key: found[key] for key in expected} == expected
    assert (found["n_layer"], found["n_hidden"], found["block_size"]) == (2, 48, 64)


@cases("keys, message", [
    (dict(model_type="gpt2"), "model_type='gpt2': choose one of llama, mistral"),
    (dict(rope_scaling=dict(rope_type="yarn", factor=2.0)), "rope_type='yarn': choose one of"),
    (dict(rope_scaling=dict(rope_type="linear")), "config.json has no factor"),
    (dict(rope_scaling=LLAMA3), "needs original_max_position_embeddings"),
    (dict(rope_parameters=dict(rope_theta=1e4, partial_rotary_factor=0.5)), "partial_rotary"),
    (dict(partial_rotary_factor=0.5), "config.json has partial_rotary_factor"),
    (dict(model_type="mistral", num_key_value_heads=4, sliding_window=32), "--block_size=32"),
    (dict(model_type="qwen2", num_key_value_heads=4, sliding_window=8,
          layer_types=["sliding_attention"]), "sliding_window=8"),
    (dict(model_type="mistral", num_key_value_heads=4, max_position_embeddings=8192), "4096"),
    (dict(layer_types=["linear_attention"]), "layer_types has linear_attention"),
    (dict(rope_parameters=dict(full_attention=dict(rope_theta=1e6))), "has full_attention"),
    (dict(rope_theta="x"), "config.json: "), (dict(rope_parameters=dict(factor=4.0)), "has factor"),
    (dict(model_type="qwen2"), "config.json has no num_key_value_heads"),
    (dict(hidden_act="gelu"), "hidden_act='gelu'"),
    (dict(attention_dropout=0.1), "attention_dropout=0.1"),
    (dict(quantization_config=dict(bits=4)), "quantization_config="),
    (dict(model_type="qwen2", num_key_value_heads=4, attention_bias=True), "attention_bias=True"),
    (dict(head_dim=5), "even width"),
    (dict(hidden_size="32"), "config.json: "),
    (dict(rms_norm_eps=None), "config.json has no rms_norm_eps"),
])  # fmt: skip
def test_config_json_is_refused_by_the_name_of_the_key(keys, message):
    refuses(message, hf.to_settings, PLAIN | keys)


@cases("size, message", [(0, "at least 1"), (-1, "at least 1"), (65, "_embeddings is 64")])
def test_a_context_that_the_model_does_not_have_is_refused(size, message):
    refuses(message, hf.to_settings, PLAIN, size)


def test_nothing_large_is_downloaded_before_config_json_is_checked(tmp_path, monkeypatch):
    asked, folder, config = [], tmp_path / "hub", tmp_path / "hub" / "config.json"
    download = lambda name, allow_patterns, **how: asked.append(allow_patterns) or str(folder)
    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    monkeypatch.setattr(hf, "safetensors", lambda: None)
    folder.mkdir()
    for keys, why in ((dict(model_type="gpt2"), "model_type='gpt2'"), ({}, "has no model.safe")):
        config.write_text(json.dumps(PLAIN | keys))
        refuses(why, hf.import_model, "a/b", str(tmp_path / "out"))
    assert asked == [["*.json"], ["*.json"], ["*.json", "*.safetensors"]]


def test_a_single_file_of_weights_is_read_before_an_index(tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    refuses("has no weight_map", hf.list_files, str(tmp_path))
    (tmp_path / "model.safetensors").touch()
    assert hf.list_files(str(tmp_path)) == [str(tmp_path / "model.safetensors")]


def test_all_tokens_that_end_a_text_are_imported_and_exported(tmp_path, monkeypatch):
    encoding = SimpleNamespace(n_vocab=64, eot_token=1, bos_token=None, own_start=list)
    monkeypatch.setattr(data_file, "get_tokenizer", lambda path: encoding)
    monkeypatch.setattr(data_file, "fingerprint", lambda encoding: b"")
    (tmp_path / "tokenizer.json").touch()
    config, file = hf.to_settings(PLAIN), tmp_path / "generation_config.json"
    for ends, ids in (([3, 1], [1, 3]), (1, 1), (None, 1)):
        file.write_text(json.dumps({"eos_token_id": ends}))
        meta = hf.tokenizer_meta(str(tmp_path), config)
        assert meta.get("stops", meta["eot"]) == ids
        assert hf.to_keys(config, 48, meta, torch.float32)["eos_token_id"] == ids
    assert data_file.ends_text(1, encoding) and not data_file.ends_text(3, encoding)
    encoding.stops = [1, 3]
    assert data_file.ends_text(3, encoding)


@cases("changes, message", [
    (dict(residual="nag"), "no class for residual='nag'"), (dict(activation="relu"), "activation"),
    (dict(residual="bhyt", smear=2), "bhyt' (only prenorm, lns, outnorm), smear=2 (only 0)"),
    (dict(moe_experts=4), "moe_experts=4"), (dict(qk_norm=True, bias=True), "qk_norm"),
    (dict(residual="outnorm"), "qk_norm_joint=False (only True)"), (dict(norm="layer"), "'layer'"),
    (dict(qk_norm=True, attn_bias="qkv"), "attn_bias='qkv' (only none or all with qk_norm)"),
    (dict(residual="nag", smear=2, n_head=7, head_dim=16, qk_norm=True, bias=True),
     "nag' (only prenorm, lns, outnorm), smear=2 (only 0), n_head=7 (only divisors of n_embd=128),"
     " bias=True"),
    (dict(logit_cap=5.0), "logit_cap=5.0"), (dict(attn_bias="qkv", bias=True), "bias=True (only"),
])  # fmt: skip
def test_models_that_transformers_lacks_are_refused(changes, message):
    refuses(message, hf.family_of, GPTConfig(**hf.SOURCE | changes))


@cases("scaling, old", [
    (None, None), ((4.0,), dict(rope_type="linear", factor=4.0)),
    ((8.0, 1.0, 4.0, 16), LLAMA3 | dict(original_max_position_embeddings=16)),
])  # fmt: skip
def test_an_export_has_the_rotary_keys_of_transformers_4_and_5(scaling, old):
    config = GPTConfig(**hf.SOURCE, rope_base=5e5, rope_scaling=scaling)
    keys = json.loads(json.dumps(hf.to_keys(config, 48, {}, torch.float32)))
    assert (keys["rope_theta"], keys["rope_scaling"]) == (5e5, old)
    new = (old or dict(rope_type="default")) | dict(rope_theta=5e5)
    assert keys["rope_parameters"] == new
    both = {"rope_base": 5e5, "rope_scaling": scaling}
    assert hf.rope(hf.Keys(keys)) == both
    forms = ("rope_parameters",), ("rope_theta", "rope_scaling")
    for form in forms:
        assert hf.rope(hf.Keys({key: keys[key] for key in form})) == both


# --- Against transformers ------------------------------------------------------------------------

SHAPE = dict(
    num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, hidden_size=24,
    intermediate_size=52, vocab_size=61, max_position_embeddings=96, rms_norm_eps=1e-5,
)  # fmt: skip
ROPE3 = LLAMA3 | dict(rope_theta=500.0, original_max_position_embeddings=24)
MODELS = {
    "llama": ("Llama", dict(rope_parameters=ROPE3, head_dim=10, attention_bias=True)),
    "smollm": ("Llama", dict(tie_word_embeddings=True, mlp_bias=True,
                             rope_parameters=dict(rope_type="linear", rope_theta=1e4, factor=4.0))),
    "mistral": ("Mistral", dict(sliding_window=96, head_dim=8)),
    "qwen2": ("Qwen2", dict(tie_word_embeddings=True)),
    "qwen3": ("Qwen3", dict(head_dim=10)),
    "olmo2": ("Olmo2", dict(pad_token_id=None)),  # it gives this row of the embedding no gradient
}  # fmt: skip


def theirs(name, folder, **how):
    """A random model of transformers, saved. Every gain and bias is random too."""
    transformers = pytest.importorskip("transformers")
    kind, changes = MODELS[name]
    config = getattr(transformers, kind + "Config")(**SHAPE | changes)
    torch.manual_seed(0)
    model = getattr(transformers, kind + "ForCausalLM")(config).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.2 * torch.randn_like(p))
    model.save_pretrained(folder, **how)
    return model


def imported(folder, to, **how):
    hf.import_model(str(folder), str(to), **how)
    return checkpoints.load_model(str(to))


@pytest.mark.slow
@cases("name", MODELS)
def test_an_imported_model_equals_that_of_transformers(name, tmp_path, capsys):
    model = theirs(name, tmp_path / "in", max_shard_size="20KB")
    assert len(list((tmp_path / "in").glob("*.safetensors"))) > 1
    state, ours = imported(tmp_path / "in", tmp_path / "out")
    idx = some_ids(T=40, vocab=61)
    expected, found = model(idx).logits, ours(idx)[0]
    difference = float((expected - found).detach().abs().max())
    with capsys.disabled():
        print(f"\n{name}: largest difference of logits {difference:.1e}")
    assert difference < 1e-5

    step = dict(max_new_tokens=64, do_sample=False, eos_token_id=None, pad_token_id=0)
    text = model.generate(idx[:, :8], attention_mask=torch.ones(2, 8), use_cache=True, **step)
    assert torch.equal(generate.generate(ours, idx[:, :8], 64, temperature=0.0), text)

    ours.loss_chunk = None
    F.cross_entropy(expected[:, :-1].flatten(0, 1), idx[:, 1:].flatten()).backward()
    ours(idx[:, :-1].contiguous(), idx[:, 1:].contiguous())[1].backward()
    of_theirs = dict(model.named_parameters())
    for here, (there, _) in hf.file_names(ours.config).items():
        assert_close(ours.get_parameter(here).grad, of_theirs[there].grad, rtol=1e-4, atol=1e-6)


def save(model, folder, **meta):
    """A checkpoint of a model, as train.py writes it."""
    os.makedirs(folder)
    meta = {"tokenizer": "bytes", "eot": 256, "tokenizer_sha256": "", "vocab_size": 257} | meta
    state = {"config": dataclasses.asdict(model.config), "settings": {"data_dir": "data/x"}}
    state |= {"model": model.state_dict(), "meta": meta, "step": 1}
    checkpoints.save(os.path.join(folder, "ckpt.pt"), state)
    return os.path.join(folder, "ckpt.pt")


@pytest.mark.slow
@cases("changes", [
    {}, dict(residual="lns"), dict(qk_norm=True, head_dim=10), dict(attn_bias="qkv", tied=True),
    dict(bias=True, rope_scaling=(4.0,)), dict(attn_bias="all", rope_scaling=(8.0, 1.0, 4.0, 16)),
    dict(residual="outnorm", qk_norm=True, qk_norm_joint=True), dict(qk_norm=True, attn_bias="all"),
])  # fmt: skip
def test_an_exported_model_is_loaded_by_transformers_and_comes_back(changes, tmp_path, capsys):
    transformers = pytest.importorskip("transformers")
    shape = dict(n_layer=3, n_head=4, n_kv_head=2, n_embd=24, vocab_size=257, block_size=40)
    ours = shaken(GPT(GPTConfig(**hf.SOURCE | shape | changes))).eval()
    hf.export_model(save(ours, tmp_path / "a"), str(tmp_path / "b"))
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "b").eval()
    idx = some_ids(T=40, vocab=257)
    assert_close(loaded(idx).logits, ours(idx)[0], rtol=0, atol=1e-5)
    assert (
        "no tokenizer.json was written: the model's tokenizer is 'bytes'" in capsys.readouterr().out
    )
    assert sorted(os.listdir(tmp_path / "b")) == ["config.json", "model.safetensors"]
    state, back = imported(tmp_path / "b", tmp_path / "c")
    if changes.get("residual") != "lns":  # its gains are folded
        for name, tensor in ours.state_dict().items():
            assert torch.equal(state["model"][name], tensor), name
        assert torch.equal(back(idx)[0], ours(idx)[0])
    refuses("already holds a model", hf.export_model, str(tmp_path / "c"), str(tmp_path / "b"))
    refuses("already holds a checkpoint", hf.import_model, str(tmp_path / "b"), str(tmp_path / "c"))


def test_an_export_of_lns_folds_the_factor_of_each_block_into_its_gains(tmp_path, monkeypatch):
    files = {}  # needs no package: the tensors are kept here in place of a file
    keep = lambda tensors, path, metadata: (files.update(tensors), open(path, "w").close())
    library = SimpleNamespace(torch=SimpleNamespace(save_file=keep))
    monkeypatch.setattr(hf, "safetensors", lambda: library)
    shape = dict(residual="lns", n_layer=3, n_embd=24, vocab_size=257)
    ours = shaken(GPT(GPTConfig(**hf.SOURCE | shape)))
    path = save(ours, tmp_path / "a")
    refuses("no folder can be made there", hf.export_model, path, f"{path}/b")
    (tmp_path / "other").mkdir()
    for name in ("model.safetensors", "tokenizer.json", "config.json"):
        (tmp_path / "other" / name).touch()
        refuses("already holds a model", hf.export_model, path, str(tmp_path / "other"))
        (tmp_path / "other" / name).unlink()
    assert not files
    hf.export_model(path, str(tmp_path / "b"))
    for b, block in enumerate(ours.blocks):
        gain = files[f"model.layers.{b}.input_layernorm.weight"]
        assert_close(gain, block.attn_residual.norm.gain.detach() / math.sqrt(b + 1))


def damage(folder, how):
    index, file = folder / "model.safetensors.index.json", min(folder.glob("*.safetensors"))
    names = json.loads(index.read_text())
    first = next(name for name, where in names["weight_map"].items() if where == file.name)
    if how == "truncated":
        file.write_bytes(file.read_bytes()[:-10])
    elif how == "wrong shape":
        keys = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(keys | {"intermediate_size": 60}))
    elif how == "missing tensor":
        other = first[:-1] + "x"
        file.write_bytes(file.read_bytes().replace(first.encode(), other.encode()))
    elif how == "pickles":
        for path in (*folder.glob("*.safetensors"), index):
            path.unlink()
        (folder / "pytorch_model.bin").write_bytes(b"")
    elif how == "no json":
        (folder / "config.json").write_text("{")
    else:
        names["weight_map"][first] = how
        index.write_text(json.dumps(names))


@pytest.mark.slow
@cases("how, message", [
    ("truncated", "is not a complete .safetensors file"), ("wrong shape", "config.json says"),
    ("missing tensor", "which config.json does not ask for"), ("pickles", "can run code"),
    ("no json", "config.json: Expecting"), ("../x.safetensors", "is not a file in its folder"),
    ("other.safetensors", "which is missing"),
])  # fmt: skip
def test_broken_files_are_refused_and_nothing_is_written(how, message, tmp_path):
    theirs("llama", tmp_path / "in", max_shard_size="30KB")
    damage(tmp_path / "in", how)
    refuses(message, hf.import_model, str(tmp_path / "in"), str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_the_head_of_a_tied_model_is_its_embedding(tmp_path):
    from safetensors.torch import load_file, save_file

    theirs("smollm", tmp_path / "in")
    file = tmp_path / "in" / "model.safetensors"
    tensors = load_file(file)
    for change, fits in ((0.0, True), (1.0, False)):
        head = tensors["model.embed_tokens.weight"] + change
        save_file(tensors | {"lm_head.weight": head}, file)
        to = tmp_path / str(fits)
        if fits:
            imported(tmp_path / "in", to)
        else:
            refuses("is not the embedding", hf.import_model, str(tmp_path / "in"), str(to))
            assert not to.exists()


@pytest.mark.slow
def test_import_says_what_is_missing(tmp_path, monkeypatch):
    refuses("not a folder", hf.import_model, str(tmp_path / "nowhere"), str(tmp_path / "out"))
    (tmp_path / "config.json").write_text("{}")
    refuses("holds a model of Hugging Face", hf.import_model, "a/b", str(tmp_path))
    monkeypatch.setitem(sys.modules, "safetensors", None)
    refuses("pip install safetensors", hf.import_model, str(tmp_path), str(tmp_path / "out"))
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    refuses("pip install tokenizers", data_file.get_tokenizer, "tokenizer.json")


# --- Tokenizers and what a user does with an imported model --------------------------------------


def make_tokenizer(folder, begins=True):
    """A small byte-level BPE with <s> and </s>. begins: its post-processor puts <s> first."""
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    special = dict(special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator([TEXT], tokenizers.trainers.BpeTrainer(vocab_size=300, **special))
    if begins:
        made.post_processor = tokenizers.processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 0)]
        )
    made.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "</s>", "bos_token": "<s>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def write_llama(folder):
    """A random Llama of transformers, with a tokenizer"""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = SHAPE | dict(vocab_size=320, bos_token_id=0, eos_token_id=1)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**config)).save_pretrained(folder)
    make_tokenizer(folder)


@pytest.fixture
def model_folder(tmp_path):
    write_llama(tmp_path / "in")
    return tmp_path / "in"


@pytest.mark.slow
def test_a_tokenizer_json_makes_the_same_ids_and_counts_bytes_exactly(tmp_path):
    make_tokenizer(tmp_path)
    encoding = data_file.get_tokenizer(str(tmp_path / "tokenizer.json"))
    ids = encoding.encode_ordinary(TEXT)
    assert encoding.decode(ids) == TEXT and encoding.eot_token == 1 and encoding.n_vocab == 300
    assert b"".join(map(encoding.decode_single_token_bytes, ids)) == TEXT.encode()
    assert data_file.token_bytes(encoding)[ids].sum() == len(TEXT.encode())
    assert data_file.token_bytes(encoding)[[0, 1, -1]].sum() == 0
    assert 1 not in encoding.encode_ordinary("a</s>b") and encoding.own_start() == [0]
    assert data_file.plain_text([0, *ids, 1], encoding) == TEXT
    meta = dict(tokenizer="tokenizer.json", eot=1, start=[0], stops=[1, 5])
    meta["tokenizer_sha256"] = data_file.fingerprint(encoding).hex()
    assert data_file.ends_text(5, data_file.meta_tokenizer(str(tmp_path), meta))
    make_tokenizer(tmp_path, begins=False)
    assert data_file.get_tokenizer(str(tmp_path / "tokenizer.json")).own_start() == []
    config = json.loads((tmp_path / "tokenizer_config.json").read_text()) | {"add_bos_token": True}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert data_file.get_tokenizer(str(tmp_path / "tokenizer.json")).own_start() == []
    transformers = pytest.importorskip("transformers")
    assert len(transformers.AutoTokenizer.from_pretrained(tmp_path)("a").input_ids) == 1
    (tmp_path / "tokenizer_config.json").unlink()
    refuses(
        "needs tokenizer_config.json", data_file.get_tokenizer, str(tmp_path / "tokenizer.json")
    )


@pytest.mark.slow
def test_an_exported_tokenizer_begins_a_text_as_training_did(tmp_path, monkeypatch):
    transformers = pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    os.makedirs("data/x")  # the shards of the model that save() writes
    make_tokenizer(tmp_path / "data" / "x")
    encoding = data_file.get_tokenizer("data/x/tokenizer.json")
    meta = dict(tokenizer="tokenizer.json", eot=1, vocab_size=300)
    meta["tokenizer_sha256"] = data_file.fingerprint(encoding).hex()
    ours = GPT(GPTConfig(**hf.SOURCE, n_layer=1, n_head=2, n_embd=24, vocab_size=300))
    hf.export_model(save(ours, "a", **meta), "b")
    exported = data_file.get_tokenizer("b/tokenizer.json")
    ids = encoding.encode_ordinary(TEXT)
    assert encoding.own_start() == [0] and exported.own_start() == [1]
    assert exported.encode_ordinary(TEXT) == ids
    assert transformers.AutoTokenizer.from_pretrained("b")(TEXT)["input_ids"] == [1, *ids]


@pytest.mark.slow
def test_what_a_user_does_with_an_imported_model(model_folder, tmp_path):
    transformers = pytest.importorskip("transformers")
    out, book, chats = tmp_path / "qwen", tmp_path / "book.txt", tmp_path / "chats.jsonl"
    book.write_text(TEXT)
    talk = [{"conversations": [f"What is {i}?", f"{i} is a number."]} for i in range(12)]
    chats.write_text("\n".join(map(json.dumps, talk)))
    script("hf.py", "import", model_folder, out_dir=out)
    how = dict(context=32, depth_tokens=64, max_new_tokens=5)
    report = evaluated(out, "loss,depth,sample", text=book, **how)
    assert report["loss"]["bytes"] == len(TEXT.encode()) and len(report["depth"]["dropped"]) == 3
    refuses("give --text or --data_dir", evaluated, out, "loss")
    refuses("on training text: give --data_dir", evaluated, out, "loss", text=book, mod_rate=0.34)
    start = dict(init_from=out, out_dir=tmp_path / "x")
    refuses("without a learning rate: give one", script, "train.py", **start)
    refuses("imported without shards", script, "train.py", **start, learning_rate=1e-3)
    refuses("has no optimizer state", script, "train.py", init_from="resume", out_dir=out)

    sft, merged = tmp_path / "sft", tmp_path / "merged" / "ckpt.pt"
    short = dict(batch_size=2, block_size=64, total_batch_tokens=128, compile=False)
    short |= dict(learning_rate=3e-4)
    fine = dict(init_from=out, out_dir=sft, sft_data=chats, max_iters=4, eval_interval=2) | short
    script("train.py", os.path.join(HERE, "config", "sft_lima.py"), **fine)
    settings = resume(sft, max_iters=6)
    assert settings["loss_chunk"] == 2048  # from the import
    assert [settings[f"{kind}_lr"] for kind in ("gate", "embed", "head")] == [None] * 3
    merged.parent.mkdir()
    script("lora.py", sft / "ckpt.pt", merged)
    script("hf.py", "export", merged, tmp_path / "back")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    ours, idx = checkpoints.load_model(str(merged))[1], some_ids(T=20, vocab=300)
    assert_close(loaded(idx).logits, ours(idx)[0], rtol=0, atol=1e-5)
    encoding = data_file.get_tokenizer(str(out / "tokenizer.json"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "back")
    assert tokenizer("def main")["input_ids"] == [0, *encoding.encode_ordinary("def main")]

    make_tokenizer(merged.parent, begins=False)
    refuses("is not the tokenizer", evaluated, merged.parent, "sample")
    refuses("another model", script, "lora.py", sft / "ckpt.pt", merged.parent / "other.pt")


@pytest.mark.slow
def test_shards_of_an_imported_tokenizer_continue_the_training(model_folder, tmp_path, monkeypatch):
    out, book, shards = tmp_path / "qwen", tmp_path / "book.txt", tmp_path / "shards"
    book.write_text(TEXT * 4)
    (tmp_path / "other.txt").write_text(TEXT * 4 + "the end")
    hf.import_model(str(model_folder), str(out))
    where = dict(source=book, val_source=tmp_path / "other.txt", data_dir=shards, workers=1)
    script("prepare_c4.py", **where, tokenizer=out / "tokenizer.json")
    short = dict(max_iters=2, block_size=32, compile=False, eval_interval=1, learning_rate=1e-3)
    script("train.py", init_from=out, out_dir=tmp_path / "more", data_dir=shards, **short)
    report = evaluated(tmp_path / "more", "loss,sample", prompt="def", max_new_tokens=5)
    assert report["loss"]["bytes"] > 0.9 * len(TEXT.encode()) * 4
    for folder in (out, tmp_path / "more"):  # with shards too, texts begin as the tokenizer says
        monkeypatch.setattr(ask, "data_dir", str(shards))
        windows, encoding = ask.open_data(*checkpoints.load_model(str(folder)))
        assert encoding.start == [0] and encoding.imported and len(windows) > 1


@pytest.mark.slow
@cases("begins", [True, False])
def test_tasks_equal_those_of_the_harness_on_the_same_model(begins, model_folder, tmp_path):
    evaluator = pytest.importorskip("lm_eval")
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager
    from test_slow import write_tasks

    make_tokenizer(model_folder, begins)
    hf.import_model(str(model_folder), str(tmp_path / "ours"))
    state, model = checkpoints.load_model(str(tmp_path / "ours"))
    encoding = data_file.meta_tokenizer(str(tmp_path / "ours"), state["meta"])
    manager = TaskManager(include_path=write_tasks(tmp_path / "tasks"), include_defaults=False)
    scores = []
    for lm in (tasks.harness(model, encoding, 4, torch.device("cpu")),
               HFLM(pretrained=str(model_folder), device="cpu", dtype="float32")):  # fmt: skip
        found = evaluator.simple_evaluate(
            lm, tasks=manager.all_tasks, task_manager=manager, bootstrap_iters=0, num_fewshot=1
        )
        scores.append({name: {k: v for k, v in metrics.items() if isinstance(v, float)}
                       for name, metrics in found["results"].items()})  # fmt: skip
    assert scores[0].keys() == scores[1].keys() and len(scores[0]) > 1
    for name in scores[0]:
        assert scores[0][name] == pytest.approx(scores[1][name], rel=1e-3, abs=1e-3), name
