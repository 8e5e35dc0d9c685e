"""Attach and detach: reversible, per instance, invisible to everything that is not assisted by a Weaver."""

import copy
import io
import pickle
import threading

import pytest
import torch
from accelerate import cpu_offload
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from support import OracleBuilder, prompt_ids, tiny_dense_model, tiny_random_config, tiny_random_model
from transformers import Qwen3_5ForCausalLM, T5Config, T5ForConditionalGeneration
from transformers.generation.streamers import BaseStreamer
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

from weaver_hf import WeaverConfig, WeaverModel
from weaver_hf.errors import CheckpointError, NotAttachedError, UnsupportedModelError
from weaver_hf.proposal import BUILDERS
from weaver_hf.target.attach import attachment_of

OPTIONS = {"max_new_tokens": 16, "do_sample": False}


def mixers(model):
    return [m for m in model.modules() if isinstance(m, Qwen3_5GatedDeltaNet)]


@pytest.fixture
def oracle(monkeypatch):
    """Drafts the stock continuation of `prompt_ids()` half of the time."""
    text = tiny_random_model().generate(prompt_ids(), **OPTIONS)[0].tolist()
    monkeypatch.setitem(BUILDERS, "oracle", lambda budget: OracleBuilder(text, nodes=9, hit=0.7))
    return text


def attached(model, **kwargs):
    return WeaverModel(WeaverConfig(tree_config={"builder": "oracle"}, **kwargs)).attach(model)


def assert_decodes(model, weaver, text):
    assert model.generate(prompt_ids(), assistant_model=weaver, **OPTIONS)[0].tolist() == text
    assert weaver.stats.tokens_per_step > 1


def test_classes_are_swapped_for_subclasses_of_the_same_name_and_put_back(model):
    weaver = WeaverModel(WeaverConfig()).attach(model)
    assert type(model) is not Qwen3_5ForCausalLM
    assert isinstance(model, Qwen3_5ForCausalLM)
    assert (type(model).__name__, type(model).__module__) == ("Qwen3_5ForCausalLM", Qwen3_5ForCausalLM.__module__)
    assert len(mixers(model)) == 3
    assert all(type(m) is not Qwen3_5GatedDeltaNet for m in mixers(model))
    weaver.detach()
    assert type(model) is Qwen3_5ForCausalLM
    assert all(type(m) is Qwen3_5GatedDeltaNet for m in mixers(model))
    assert attachment_of(model) is None
    assert sorted(vars(model)) == sorted(vars(tiny_random_model()))


def test_attaching_twice_changes_nothing_and_two_models_share_one_class(model):
    weaver = WeaverModel(WeaverConfig())
    assert weaver.attach(model).attach(model) is weaver
    assert attachment_of(model).weavers == [weaver]
    other = tiny_random_model()
    WeaverModel(WeaverConfig()).attach(other)
    assert type(other) is type(model)


def test_the_last_of_several_weavers_puts_the_classes_back(model, oracle):
    first, second = attached(model), attached(model)
    assert_decodes(model, first, oracle)
    first.detach()
    with pytest.raises(NotAttachedError):
        model.generate(prompt_ids(), assistant_model=first, **OPTIONS)
    assert_decodes(model, second, oracle)
    second.detach()
    assert type(model) is Qwen3_5ForCausalLM
    second.detach()  # again is harmless


def test_attach_generate_detach_attach_again(model, oracle):
    weaver = attached(model)
    assert_decodes(model, weaver, oracle)
    weaver.detach()
    assert model.generate(prompt_ids(), **OPTIONS)[0].tolist() == oracle
    assert_decodes(model, weaver.attach(model), oracle)


def test_a_weaver_serves_one_model_at_a_time(model):
    weaver = WeaverModel(WeaverConfig()).attach(model)
    with pytest.raises(NotAttachedError, match="attached to another model"):
        weaver.attach(tiny_random_model())
    weaver.detach().attach(tiny_random_model())


@pytest.mark.parametrize(
    "options", [{}, {"num_beams": 3}, {"do_sample": True}, {"num_return_sequences": 2, "num_beams": 2}]
)
def test_generation_without_a_weaver_is_unchanged(model, weaver, options):
    ids = torch.cat([prompt_ids(seed=1), prompt_ids(seed=2)])
    outputs = []
    for target in (tiny_random_model(), model):
        torch.manual_seed(3)
        outputs.append(target.generate(ids, attention_mask=torch.ones_like(ids), **{**OPTIONS, **options}))
    assert torch.equal(*outputs)


def test_any_other_assistant_is_refused_as_before(model, weaver):
    messages = []
    for target in (tiny_random_model(), model):
        with pytest.raises(ValueError, match="not supported with stateful models") as error:
            target.generate(prompt_ids(), assistant_model=tiny_dense_model(), **OPTIONS)
        messages.append(str(error.value))
        with pytest.raises(ValueError, match="not supported with stateful models"):
            target.generate(prompt_ids(), prompt_lookup_num_tokens=3, **OPTIONS)
    assert messages[0] == messages[1]


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_an_attached_model_pickles_as_the_original_class(model, weaver, protocol):
    copied = pickle.loads(pickle.dumps(model, protocol))
    assert type(copied) is Qwen3_5ForCausalLM
    assert all(type(m) is Qwen3_5GatedDeltaNet for m in mixers(copied))
    assert attachment_of(copied) is None
    assert torch.equal(copied.generate(prompt_ids(), **OPTIONS), model.generate(prompt_ids(), **OPTIONS))


def test_deep_copies_and_torch_save_give_a_stock_model(model, weaver):
    assert type(copy.deepcopy(model)) is Qwen3_5ForCausalLM
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    assert type(torch.load(buffer, weights_only=False)) is Qwen3_5ForCausalLM
    assert type(model) is not Qwen3_5ForCausalLM, "the model itself stays attached"


def test_save_pretrained_writes_a_stock_checkpoint(model, weaver, tmp_path, oracle):
    model.save_pretrained(tmp_path)
    loaded = Qwen3_5ForCausalLM.from_pretrained(tmp_path)
    loaded.generation_config.eos_token_id = None
    assert loaded.generate(prompt_ids(), **OPTIONS)[0].tolist() == oracle


def test_the_target_is_no_submodule_of_the_weaver_and_is_not_kept_alive(model):
    weaver = WeaverModel(WeaverConfig()).attach(model)
    assert list(weaver.parameters()) == []
    other = WeaverModel(WeaverConfig()).attach(tiny_random_model())
    assert other.target is None, "held weakly: the model above is gone"


def test_train_and_eval_keep_the_swap(model, oracle):
    weaver = attached(model)
    model.train()
    model.eval()
    assert_decodes(model, weaver, oracle)


@pytest.mark.parametrize("order", ["hooks-then-attach", "attach-then-hooks"])
def test_accelerate_hooks_keep_working_and_can_be_removed(model, oracle, order):
    calls = []

    class Counting(ModelHook):
        def pre_forward(self, module, *args, **kwargs):
            calls.append(type(module).__name__)
            return args, kwargs

    def hook():
        for module in [model, *mixers(model)]:
            add_hook_to_module(module, Counting())

    if order == "hooks-then-attach":
        hook()
    weaver = attached(model)
    if order == "attach-then-hooks":
        hook()
    assert_decodes(model, weaver, oracle)
    assert calls.count("Qwen3_5GatedDeltaNet") == 3 * (weaver.stats.steps + 1)
    for module in [model, *mixers(model)]:
        remove_hook_from_module(module)  # leaves the bound forward on the instance
    assert_decodes(model, weaver, oracle)
    weaver.detach()
    assert model.generate(prompt_ids(), **OPTIONS)[0].tolist() == oracle
    assert_decodes(model, weaver.attach(model), oracle)


@pytest.mark.parametrize("order", ["wrap-then-attach", "attach-then-wrap"])
def test_a_lora_wrapped_target_decodes_through_peft(model, monkeypatch, order):
    weaver = None
    if order == "attach-then-wrap":
        weaver = WeaverModel(WeaverConfig()).attach(model)
    wrapped = get_peft_model(
        model, LoraConfig(target_modules=["q_proj", "in_proj_qkv", "in_proj_b"], task_type="CAUSAL_LM")
    )
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.3)
    if weaver is None:
        weaver = WeaverModel(WeaverConfig()).attach(wrapped)
    with wrapped.disable_adapter():
        base = wrapped.generate(input_ids=prompt_ids(), **OPTIONS)
    plain = wrapped.generate(input_ids=prompt_ids(), **OPTIONS)
    assert not torch.equal(plain, base), "the adapter must matter"
    monkeypatch.setitem(BUILDERS, "oracle", lambda budget: OracleBuilder(plain[0].tolist(), nodes=9, hit=0.8))
    weaver.tree_config.builder = "oracle"
    assert torch.equal(wrapped.generate(input_ids=prompt_ids(), assistant_model=weaver, **OPTIONS), plain)
    assert weaver.stats.tokens_per_step > 1
    weaver.detach()
    assert type(wrapped.get_base_model()) is Qwen3_5ForCausalLM


def test_prompt_learning_is_refused(model):
    config = PromptTuningConfig(
        task_type="CAUSAL_LM", num_virtual_tokens=3, token_dim=64, num_layers=4, num_attention_heads=4
    )
    with pytest.raises(UnsupportedModelError, match="learns a prompt"):
        WeaverModel(WeaverConfig()).attach(get_peft_model(model, config))


def test_other_families_are_refused_with_the_list_of_those_supported():
    with pytest.raises(UnsupportedModelError, match=r"Qwen3ForCausalLM of model_type 'qwen3'.*Qwen3_5ForCausalLM"):
        WeaverModel(WeaverConfig()).attach(tiny_dense_model())
    with pytest.raises(UnsupportedModelError, match="a Linear"):
        WeaverModel(WeaverConfig()).attach(torch.nn.Linear(2, 2))


@pytest.mark.parametrize("field", [{"vocab_size": 4096}, {"hidden_size": 65}])
def test_a_weaver_made_for_another_target_is_refused_with_both_values(model, field):
    ((name, value),) = field.items()
    with pytest.raises(
        CheckpointError, match=rf"{name} {value}; expected {name} {getattr(tiny_random_config(), name)}"
    ):
        WeaverModel(WeaverConfig(**field)).attach(model)
    assert type(model) is Qwen3_5ForCausalLM, "refused before anything was swapped"


def test_concurrent_calls_on_one_model_take_turns(model, oracle):
    weavers, texts = [attached(model) for _ in range(3)], {}

    def run(index):
        texts[index] = model.generate(prompt_ids(), assistant_model=weavers[index], **OPTIONS)[0].tolist()

    threads = [threading.Thread(target=run, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == dict.fromkeys(range(3), oracle)


def test_a_replaced_mixer_forward_is_an_error_not_a_wrong_text(model, oracle):
    weaver = attached(model)
    mixer = mixers(model)[1]
    stock = Qwen3_5GatedDeltaNet.forward

    def kernel(hidden_states, *args, weaver_tree=None, **kwargs):  # as kernelize does it: bound on the instance
        return stock(mixer, hidden_states, *args, **kwargs)

    mixer.forward = kernel
    with pytest.raises(UnsupportedModelError, match="did not run the tree forward"):
        model.generate(prompt_ids(), assistant_model=weaver, **OPTIONS)


def test_detaching_inside_a_running_call_is_refused(model, oracle):
    weaver, errors = attached(model), []

    class Detaches(BaseStreamer):
        def put(self, value):
            if value.numel() == prompt_ids().numel():
                return  # the prompt, which `generate` itself hands over before decoding starts
            try:
                weaver.detach()
            except NotAttachedError as error:
                errors.append(str(error))

        def end(self):
            pass

    text = model.generate(prompt_ids(), assistant_model=weaver, streamer=Detaches(), **OPTIONS)
    assert text[0].tolist() == oracle
    assert "inside a running generate" in errors[-1]
    weaver.detach()
    assert type(model) is Qwen3_5ForCausalLM


def test_prompt_learning_that_comes_after_attach_is_noticed(model, weaver):
    config = PromptTuningConfig(
        task_type="CAUSAL_LM", num_virtual_tokens=3, token_dim=64, num_layers=4, num_attention_heads=4
    )
    wrapped = get_peft_model(model, config)
    with pytest.raises(UnsupportedModelError, match="rows in the cache after the prefill"):
        wrapped.generate(input_ids=prompt_ids(), assistant_model=weaver, **OPTIONS)


@pytest.mark.parametrize(
    ("overrides", "match"),
    [({"hidden_act": "gelu"}, r"hidden_act \['gelu'\]"), ({"layer_types": ["full_attention"] * 4}, "full_attention")],
)
def test_layers_that_the_tree_forward_does_not_cover_are_refused(overrides, match):
    with pytest.raises(UnsupportedModelError, match=match):
        WeaverModel(WeaverConfig()).attach(tiny_random_model(**overrides))


def test_an_encoder_decoder_is_refused():
    config = T5Config(vocab_size=64, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0)
    with pytest.raises(UnsupportedModelError, match="T5ForConditionalGeneration"):
        WeaverModel(WeaverConfig()).attach(T5ForConditionalGeneration(config))


def test_a_target_offloaded_by_accelerate_decodes_and_gives_its_taps(model, oracle):
    weaver = attached(model, target_layer_ids=[0, 2])
    cpu_offload(model, execution_device=torch.device("cpu"))
    assert_decodes(model, weaver, oracle)
    assert weaver.device.type == "cpu"


def test_an_old_transformers_is_refused(model, monkeypatch):
    from packaging.version import Version

    from weaver_hf.target import compat

    monkeypatch.setattr(compat, "TRANSFORMERS", Version("5.16.1"))
    with pytest.raises(ImportError, match="5.17.0 or newer"):
        WeaverModel(WeaverConfig()).attach(model)
