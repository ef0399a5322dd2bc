"""The unmodified tinker SDK against the gateway: what it sends is understood, what it gets back it accepts."""

import math

import pytest
import tinker
from tinker import types

from plexrl.types import CallKind, Failed
from tests.unit.gateway.fakehead import FakeHead, serve


@pytest.fixture(scope="module")
def trainer(service: tinker.ServiceClient) -> tinker.TrainingClient:
    return service.create_lora_training_client("smol", rank=32, seed=5, train_unembed=False).result()


def datum(length: int = 4, **inputs: list[float]) -> types.Datum:
    inputs = inputs or {"weights": [1.0] * length}
    return types.Datum(
        model_input=types.ModelInput.from_ints(list(range(length))),
        loss_fn_inputs={"target_tokens": list(range(length)), **inputs},
    )


def last_train(head: FakeHead):
    return head.asked("train")[-1]


def test_session_and_lora_model(trainer: tinker.TrainingClient, head: FakeHead):
    opened = head.asked("open_session")[0]
    assert opened.idempotency_key
    assert opened.sdk_version == tinker.__version__
    created = head.asked("create_model")[0]
    assert (created.base_model, created.lora_rank, created.lora_seed) == ("smol", 32, 5)
    assert (created.train_attn, created.train_mlp, created.train_unembed) == (True, True, False)
    info = trainer.get_info()
    assert info.is_lora
    assert info.lora_rank == 32
    assert info.model_data.tokenizer_id == head.folder


def test_rank_zero_is_full_parameters(service: tinker.ServiceClient, head: FakeHead):
    trainer = service.create_lora_training_client("smol", rank=0).result()
    assert head.asked("create_model")[-1].lora_rank is None
    assert trainer.get_info().is_lora is False
    assert trainer.get_info().lora_rank is None


def test_tokenizer_comes_from_the_declared_folder(trainer: tinker.TrainingClient):
    assert trainer.get_tokenizer().encode("one two three") == [0, 1, 2]


def test_forward(trainer: tinker.TrainingClient, head: FakeHead):
    result = trainer.forward([datum(3), datum(5)], "cross_entropy").result()
    assert [list(output["logprobs"].data) for output in result.loss_fn_outputs] == [[-0.5] * 3, [-0.5] * 5]
    assert (last_train(head).kind, last_train(head).units) == (CallKind.FORWARD, 8)


def test_forward_backward_and_optim_step_are_pipelined_in_order(trainer: tinker.TrainingClient, head: FakeHead):
    sampled = datum(4, logprobs=[-1.0] * 4, advantages=[0.0, 1.0, 1.0, -1.0])
    backward = trainer.forward_backward([sampled] * 3, "importance_sampling")
    update = trainer.optim_step(types.AdamParams(learning_rate=3e-4))
    assert backward.result().metrics["loss:sum"] == pytest.approx(6.0)
    assert update.result().metrics == {"grad_norm": 1.5}
    first, second = head.asked("train")[-2:]
    assert (first.kind, second.kind) == (CallKind.FORWARD_BACKWARD, CallKind.OPTIM_STEP)
    assert second.seq == first.seq + 1
    assert first.digest


def test_custom_loss_runs_in_the_client(trainer: tinker.TrainingClient):
    def loss(data, logprobs):
        total = -sum(values.sum() for values in logprobs)
        return total, {"mine": float(total.detach())}

    result = trainer.forward_backward_custom([datum(4)], loss).result()
    assert result.metrics["mine"] == pytest.approx(2.0)


def test_held_polls_are_repeated(trainer: tinker.TrainingClient, head: FakeHead):
    head.polls_held = 3
    assert trainer.optim_step(types.AdamParams()).result().metrics


def test_save_and_load_state(service: tinker.ServiceClient, trainer: tinker.TrainingClient, head: FakeHead):
    saved = trainer.save_state("step-1", ttl_seconds=3600, overwrite=True).result()
    call = last_train(head)
    assert (call.kind, call.name, call.ttl_seconds, call.overwrite) == (CallKind.SAVE_STATE, "step-1", 3600, True)
    assert saved.path == f"tinker://{call.model}/weights/step-1"
    assert "step-1" in saved.get_console_url()

    for optimizer, create in (
        (False, service.create_training_client_from_state),
        (True, service.create_training_client_from_state_with_optimizer),
    ):
        resumed = create(saved.path).result()
        loaded = head.asked("load_model")[-1]
        assert (loaded.path, loaded.optimizer) == (saved.path, optimizer)
        assert resumed.get_info().model_id == f"{loaded.session}:train:{loaded.model_seq}"


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_load_into_an_existing_model(trainer: tinker.TrainingClient, head: FakeHead):
    trainer.load_state_with_optimizer("tinker://s0:train:0/weights/step-1").result()
    call = last_train(head)
    assert (call.kind, call.path, call.optimizer) == (CallKind.LOAD_STATE, "tinker://s0:train:0/weights/step-1", True)


def test_publish_by_name_and_sample(service: tinker.ServiceClient, trainer: tinker.TrainingClient, head: FakeHead):
    published = trainer.save_weights_for_sampler("v1").result()
    assert (last_train(head).kind, last_train(head).name) == (CallKind.PUBLISH, "v1")
    sampler = service.create_sampling_client(model_path=published.path).result()
    assert head.asked("open_sampler")[-1].model_path == published.path
    assert sampler.get_base_model() == head.folder
    assert sampler.get_tokenizer().encode("two") == [1]


def test_publish_into_a_sampling_client(trainer: tinker.TrainingClient, head: FakeHead):
    sampler = trainer.save_weights_and_get_sampling_client().result()
    assert (last_train(head).kind, last_train(head).name) == (CallKind.PUBLISH, None)
    assert last_train(head).sampler_seq is not None
    params = types.SamplingParams(max_tokens=16, seed=3, stop=["\n", "User:"], temperature=0.7, top_p=0.9, top_k=5)
    answer = sampler.sample(types.ModelInput.from_ints([1, 2, 3]), 4, params).result()
    assert [list(sequence.tokens) for sequence in answer.sequences] == [[0, 7], [1, 7], [2, 7], [3, 7]]
    assert list(answer.sequences[0].logprobs) == [-1.0, -2.0]
    assert answer.sequences[0].stop_reason == "stop"
    asked = head.asked("sample")[-1]
    assert (asked.num_samples, asked.units) == (4, 3 + 4 * 16)


def test_sample_from_the_base_model_with_every_kind_of_stop(service: tinker.ServiceClient):
    sampler = service.create_sampling_client(base_model="smol").result()
    prompt = types.ModelInput.from_ints([1, 2, 3])
    for stop in (None, "x", ["x"], [7, 8], []):
        sampler.sample(prompt, 1, types.SamplingParams(max_tokens=4, stop=stop)).result()
    sampler.sample(prompt, 1, types.SamplingParams()).result()
    logprobs = sampler.compute_logprobs(prompt).result()
    assert logprobs[0] is None or math.isnan(logprobs[0])
    assert list(logprobs[1:]) == [-3.0, -3.0]


def test_capabilities(gateway, head: FakeHead):
    with serve(gateway, head) as url:
        listed = tinker.RestClient(base_url=url, api_key="tml-test").get_server_capabilities().result().supported_models
    assert [(model.model_name, model.max_context_length, model.trainable) for model in listed] == [("smol", 512, True)]


def test_failed_call_is_a_request_failed_error(trainer: tinker.TrainingClient, head: FakeHead):
    head.fail_next = Failed(error="The loss is NaN. Lower the learning rate", category="user")
    with pytest.raises(tinker.RequestFailedError, match="loss is NaN") as caught:
        trainer.forward_backward([datum()], "cross_entropy").result()
    assert caught.value.category == types.RequestErrorCategory.User


def test_refusals_are_the_sdks_own_exceptions(service: tinker.ServiceClient, trainer: tinker.TrainingClient):
    with pytest.raises(tinker.BadRequestError, match="Unknown base model 'huge'. Ask for one of: smol"):
        service.create_lora_training_client("huge").result()
    with pytest.raises(tinker.BadRequestError, match="no base model's name"):
        service.create_lora_training_client("/home/bob/private/model").result()
    with pytest.raises(tinker.BadRequestError, match="LoRA rank 64 is out of range. Give 1 to 32"):
        service.create_lora_training_client("smol", rank=64).result()
    with pytest.raises(tinker.BadRequestError, match="no checkpoint path"):
        service.create_sampling_client(model_path="tinker://s0/../../etc/passwd").result()
    with pytest.raises(tinker.BadRequestError, match="no name for a checkpoint"):
        trainer.save_state("../x").result()
    with pytest.raises(tinker.BadRequestError, match="Datum 0 lacks the loss input 'logprobs'"):
        trainer.forward_backward([datum()], "ppo").result()
    with pytest.raises(tinker.BadRequestError, match="in-flight sampling client is not built"):
        trainer.save_weights_and_get_sampling_client(kind="inflight").result()


def test_a_refused_training_call_uses_up_its_seq_id(trainer: tinker.TrainingClient, head: FakeHead):
    before = len(head.consumed)
    with pytest.raises(tinker.BadRequestError, match=r"<= 1.0 - at `\$.adam_params.learning_rate`"):
        trainer.optim_step(types.AdamParams(learning_rate=7.0)).result()
    with pytest.raises(tinker.BadRequestError, match="600 tokens; no model of this pool takes more than 512"):
        trainer.forward_backward([datum(600)], "cross_entropy").result()
    trainer.optim_step(types.AdamParams()).result()
    (model, first), (_, second) = head.consumed[before:]
    assert (model, second, last_train(head).seq) == (last_train(head).model, first + 1, first + 2)


def test_prompt_longer_than_the_context(service: tinker.ServiceClient):
    sampler = service.create_sampling_client(base_model="smol").result()
    with pytest.raises(tinker.BadRequestError, match="within the context of 512 tokens"):
        sampler.sample(types.ModelInput.from_ints([1] * 600), 1, types.SamplingParams(max_tokens=4)).result()


def test_images_are_not_built(service: tinker.ServiceClient):
    sampler = service.create_sampling_client(base_model="smol").result()
    image = types.ModelInput(chunks=[types.ImageChunk(data=b"x", format="png", expected_tokens=1)])
    with pytest.raises(tinker.BadRequestError, match="'image' is not built"):
        sampler.sample(image, 1, types.SamplingParams(max_tokens=4)).result()


def test_what_is_not_there_says_so(gateway, head: FakeHead):
    with serve(gateway, head) as url:
        rest = tinker.RestClient(base_url=url, api_key="tml-test")
        with pytest.raises(tinker.NotFoundError, match="Listing training runs .* is not built"):
            rest.list_training_runs().result()


def test_closing_finishes_the_session(gateway, head: FakeHead):
    with serve(gateway, head) as url:
        client = tinker.ServiceClient(base_url=url, api_key="tml-test")
        client.create_lora_training_client("smol").result()
        client.close(status="errored", detail="on purpose").result()
    assert head.asked("finish_session")[-1].reason == "errored"
