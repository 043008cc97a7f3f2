"""What a model string means, with the registry there and away."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

import pytest

from loraplex.api.registry import Tag, TagTarget
from loraplex.api.request import ChatPrompt, Prompt, RequestedAdapter, TextPrompt, TokenPrompt
from loraplex.errors import AdapterNotFound, InvalidRequest, LoraplexError, NotFound, Unavailable
from loraplex.refs import Ref
from loraplex_services.gateway.registry.resolve import Resolver
from loraplex_services.gateway.registry.snapshot import RegistrySnapshot, Version
from loraplex_services.gateway.request import GenerateCall, ServedModel, Target, beginning_hash

CALL = GenerateCall(tenant="default", model="", prompt=TextPrompt("x"))


class RegistryLookup:
    """Answers look-ups from a list, or fails."""

    def __init__(self) -> None:
        self.known: dict[str, tuple[Version, tuple[Tag, ...]]] = {}
        self.asked: list[str] = []
        self.error: LoraplexError | None = None

    async def lookup(
        self, ref: Ref, split_key: str, base_ids: Collection[str]
    ) -> tuple[Version, tuple[Tag, ...]]:
        self.asked.append(str(ref))
        if self.error is not None:
            raise self.error
        if str(ref) not in self.known:
            raise AdapterNotFound(str(ref))
        return self.known[str(ref)]


def _version(number: int = 1, **fields: object) -> Version:
    made = Version("default", "upper", number, f"sha256:{number:064x}", "base")
    return replace(made, **fields)


def _tag(weights: dict[int, int], tag: str = "latest", generation: int = 1) -> Tag:
    targets = tuple(
        TagTarget(number, f"sha256:{number}", weight) for number, weight in weights.items()
    )
    return Tag("default", "upper", tag, targets, generation, updated_unix_s=float(generation))


@pytest.fixture
def registry() -> RegistryLookup:
    return RegistryLookup()


@pytest.mark.parametrize("model", ["base", "upper", "unknown"])
async def test_nothing_counts_as_missing_before_a_worker_was_seen(
    registry: RegistryLookup, model: str
) -> None:
    resolver = Resolver(registry, dict)
    resolver.snapshot.put_version(_version(1))
    with pytest.raises(Unavailable, match="no worker is ready") as caught:
        await resolver.target(replace(CALL, model=model))
    assert caught.value.retry_after_s


@pytest.fixture
def resolver(registry: RegistryLookup) -> Resolver:
    made = Resolver(registry, lambda: {"base": ServedModel("base", 10, 10)})
    made.snapshot.put_version(_version(1))
    made.snapshot.put_version(_version(2))
    made.snapshot.put_tag(_tag({2: 1}))
    return made


async def _label(resolver: Resolver, model: str, **fields: object) -> str:
    target = await resolver.target(replace(CALL, model=model, **fields))
    return target.adapters[0].label


async def test_base_ids_come_first(resolver: Resolver) -> None:
    assert await resolver.target(replace(CALL, model="base")) == Target("base")


async def test_every_form_of_reference_answers_from_the_snapshot(
    resolver: Resolver, registry: RegistryLookup
) -> None:
    assert await _label(resolver, "upper") == "default/upper:v2"
    assert await _label(resolver, "default/upper:latest") == "default/upper:v2"
    assert await _label(resolver, "upper:v1") == "default/upper:v1"
    assert await _label(resolver, f"upper@sha256:{1:064x}") == "default/upper:v1"
    assert registry.asked == []


async def test_missing_reference_is_asked_once_and_remembered(
    resolver: Resolver, registry: RegistryLookup
) -> None:
    registry.known["default/upper:v3"] = (_version(3), (_tag({3: 1}, generation=2),))
    assert await _label(resolver, "upper:v3") == "default/upper:v3"
    assert await _label(resolver, "upper:v3") == "default/upper:v3"
    assert await _label(resolver, "upper") == "default/upper:v3"
    assert registry.asked == ["default/upper:v3"]


@pytest.mark.parametrize(
    ("bases", "model", "label"),
    [
        (["base"], None, "default/upper:v2"),
        (["twin"], None, "default/upper:v3"),
        (["base", "twin"], None, "default/upper:v2"),
        (["base", "twin"], "base", "default/upper:v2"),
        (["base", "twin"], "twin", "default/upper:v3"),
    ],
)
async def test_a_digest_that_was_published_for_several_bases_keeps_its_base_where_that_is_served(
    registry: RegistryLookup, bases: list[str], model: str | None, label: str
) -> None:
    resolver = Resolver(registry, lambda: {each: ServedModel(each, 10, 10) for each in bases})
    first = _version(1)
    again = replace(first, number=2)  # with another README
    for version in (replace(first, number=3, base_id="twin"), again, first):
        resolver.snapshot.put_version(version)
    ref = f"upper@{first.digest}"
    asked = () if model is None else (RequestedAdapter(ref, None),)
    assert await _label(resolver, model or ref, adapters=asked) == label


async def test_a_digest_that_was_just_published_for_a_served_base_is_found(
    resolver: Resolver, registry: RegistryLookup
) -> None:
    """The snapshot has the version that was published for another base before."""
    other = replace(_version(3), base_id="twin")
    resolver.snapshot.put_version(other)
    ref = f"upper@{other.digest}"
    registry.known[f"default/{ref}"] = (other, ())
    with pytest.raises(AdapterNotFound, match="its base 'twin' is not served here"):
        await _label(resolver, ref)
    registry.known[f"default/{ref}"] = (replace(other, number=4, base_id="base"), ())
    assert await _label(resolver, ref) == "default/upper:v4"


class SlowLookup(RegistryLookup):
    """Something happens between its answer and the arrival of the answer."""

    def __init__(self) -> None:
        super().__init__()
        self.meanwhile: Callable[[], None] = lambda: None

    async def lookup(
        self, ref: Ref, split_key: str, base_ids: Collection[str]
    ) -> tuple[Version, tuple[Tag, ...]]:
        answer = await super().lookup(ref, split_key, base_ids)
        self.meanwhile()
        return answer


@pytest.mark.parametrize("others", [0, 5000])
async def test_an_answer_from_before_a_deletion_does_not_revive_the_version(others: int) -> None:
    registry = SlowLookup()
    resolver = Resolver(registry, lambda: {"base": ServedModel("base", 10, 10)})
    registry.known["default/upper:latest"] = (_version(3), (_tag({3: 1}),))

    def delete() -> None:
        resolver.snapshot.put_version(_version(3, deleted=True))
        for number in range(others):
            resolver.snapshot.put_version(_version(number, name="other"))

    registry.meanwhile = delete
    assert await _label(resolver, "upper") == "default/upper:v3", "it was there when it was asked"
    registry.known.clear()
    with pytest.raises(NotFound):
        await _label(resolver, "upper")
    assert not resolver.snapshot.perhaps_visible("default") or others


async def test_an_answer_from_before_an_adapter_became_private_does_not_show_it_again() -> None:
    registry = SlowLookup()
    resolver = Resolver(registry, lambda: {"base": ServedModel("base", 10, 10)})
    registry.known["default/upper:v3"] = (_version(3, is_public=True), ())
    registry.meanwhile = lambda: resolver.snapshot.put_version(_version(3))
    with pytest.raises(NotFound):
        await _label(resolver, "default/upper:v3", tenant="stranger")


async def test_an_answer_for_an_old_snapshot_is_not_put_into_the_new_one() -> None:
    registry = SlowLookup()
    resolver = Resolver(registry, lambda: {"base": ServedModel("base", 10, 10)})
    registry.known["default/upper:latest"] = (_version(3), (_tag({3: 1}),))
    registry.meanwhile = lambda: setattr(resolver, "snapshot", RegistrySnapshot())
    assert await _label(resolver, "upper") == "default/upper:v3"
    assert resolver.snapshot.num_adapters == 0


async def test_nothing_anywhere_is_not_found(resolver: Resolver) -> None:
    with pytest.raises(NotFound):
        await resolver.target(replace(CALL, model="nobody"))


async def test_registry_away_serves_what_is_known_and_says_why_it_cannot_know_more(
    resolver: Resolver, registry: RegistryLookup
) -> None:
    registry.error = Unavailable("gone")
    assert await _label(resolver, "upper") == "default/upper:v2"
    with pytest.raises(Unavailable, match="registry"):
        await resolver.target(replace(CALL, model="nobody"))


async def test_others_private_adapters_look_missing(resolver: Resolver) -> None:
    resolver.snapshot.put_version(_version(2, shared_with=frozenset({"friend"})))
    assert await _label(resolver, "default/upper", tenant="friend") == "default/upper:v2"
    for name in ("default/upper", "default/nobody"):
        with pytest.raises(AdapterNotFound, match=f"no adapter {name}; .* shared with stranger"):
            await _label(resolver, name, tenant="stranger")
    resolver.snapshot.put_version(_version(2, is_public=True))
    assert await _label(resolver, "default/upper", tenant="stranger") == "default/upper:v2"


async def test_an_adapter_of_another_geometry_is_not_served_by_a_base_of_the_same_id(
    registry: RegistryLookup,
) -> None:
    made = Resolver(registry, lambda: {"base": ServedModel("base", 10, 10, fingerprint="now")})
    made.snapshot.put_version(_version(1, base_fingerprint="now"))
    made.snapshot.put_version(_version(2, base_fingerprint="then"))
    assert await _label(made, "upper:v1") == "default/upper:v1"
    with pytest.raises(AdapterNotFound, match="another base that was called 'base'"):
        await _label(made, "upper:v2")
    made.snapshot.put_tag(_tag({2: 1}))
    assert [type(model) for model in made.models("default")] == [ServedModel]


@pytest.mark.parametrize("base_id", ["base", "Qwen/Qwen3-8B"])
async def test_an_adapter_named_after_its_base_is_named_without_it(
    registry: RegistryLookup, base_id: str
) -> None:
    resolver = Resolver(registry, lambda: {base_id: ServedModel(base_id, 10, 10)})
    with pytest.raises(AdapterNotFound, match="without the base, as 'upper'"):
        await resolver.target(replace(CALL, model=f"{base_id}:upper"))
    assert registry.asked == []


async def test_what_is_missing_is_named_as_it_was_first_published(resolver: Resolver) -> None:
    resolver.snapshot.put_version(replace(_version(1), name="Mixed"))
    why = "no adapter 'default/Mixed:v7': default/Mixed has no version v7"
    with pytest.raises(AdapterNotFound, match=why):
        await _label(resolver, "mixed:v7")


async def test_deleted_version_is_gone(resolver: Resolver) -> None:
    resolver.snapshot.put_version(_version(1, deleted=True))
    with pytest.raises(AdapterNotFound):
        await _label(resolver, "upper:v1")


async def test_adapter_of_a_base_that_is_not_served_is_not_found(resolver: Resolver) -> None:
    resolver.snapshot.put_version(_version(2, base_id="other"))
    with pytest.raises(AdapterNotFound, match="other"):
        await _label(resolver, "upper")
    assert [m.base_id for m in resolver.models("default")] == ["base"]
    with pytest.raises(AdapterNotFound, match="not served here"):
        await resolver.model("upper", "default")


async def test_split_sticks_to_its_key_in_proportion(resolver: Resolver) -> None:
    resolver.snapshot.put_tag(_tag({1: 90, 2: 10}, tag="prod"))
    seen = {
        key: await _label(resolver, "upper:prod", split_key=key) for key in map(str, range(1000))
    }
    counts = Counter(seen.values())
    assert 60 < counts["default/upper:v2"] < 140
    for key, label in list(seen.items())[:50]:
        assert await _label(resolver, "upper:prod", split_key=key) == label


async def test_older_news_of_a_tag_changes_nothing(resolver: Resolver) -> None:
    resolver.snapshot.put_tag(_tag({1: 1}, generation=5))
    resolver.snapshot.put_tag(_tag({2: 1}, generation=4))
    assert await _label(resolver, "upper") == "default/upper:v1"


async def test_deleted_tag_is_asked_again(resolver: Resolver, registry: RegistryLookup) -> None:
    resolver.snapshot.put_tag(_tag({}, generation=9))
    with pytest.raises(AdapterNotFound):
        await _label(resolver, "upper")
    assert registry.asked == ["default/upper:latest"]


async def test_several_adapters_need_the_base_as_model(resolver: Resolver) -> None:
    asked = (
        RequestedAdapter("upper:v2", 0.5),
        RequestedAdapter("upper:v1"),
        RequestedAdapter("upper:v1"),
    )
    target = await resolver.target(replace(CALL, model="base", adapters=asked))
    assert [(a.label, a.weight) for a in target.adapters] == [
        ("default/upper:v1", 2.0),
        ("default/upper:v2", 0.5),
    ]
    with pytest.raises(InvalidRequest) as caught:
        await resolver.target(replace(CALL, model="upper", adapters=asked))
    assert caught.value.violations[0].field == "adapters"


@pytest.mark.parametrize("weight", [float("nan"), 1e6])
async def test_weight_out_of_range_is_named(resolver: Resolver, weight: float) -> None:
    asked = (RequestedAdapter("upper", weight),)
    with pytest.raises(InvalidRequest) as caught:
        await resolver.target(replace(CALL, model="base", adapters=asked))
    assert caught.value.violations[0].field == "adapters[0].weight"


async def test_badly_spelled_model_shows_the_right_spelling(resolver: Resolver) -> None:
    with pytest.raises(InvalidRequest, match="'Up-per'"):
        await resolver.target(replace(CALL, model="Up per"))


async def test_names_are_found_in_any_case_and_shown_as_published(resolver: Resolver) -> None:
    resolver.snapshot.put_version(replace(_version(1), name="Policy-Step"))
    resolver.snapshot.put_tag(replace(_tag({1: 1}), name="policy-step"))
    for spelled in ("Policy-Step", "policy-step:v1", "POLICY-STEP:latest"):
        target = await resolver.target(replace(CALL, model=spelled))
        assert target.adapters[0].label == "default/Policy-Step:v1"
    shown = [getattr(model, "name", "") for model in resolver.models("default")]
    assert "Policy-Step" in shown


def test_models_list_own_adapters_before_public_ones(resolver: Resolver) -> None:
    resolver.snapshot.put_version(replace(_version(1), tenant="acme", is_public=True))
    names = [getattr(m, "tenant", "") for m in resolver.models("default")]
    assert names == ["", "default", "acme"]


def _text(end: str) -> Prompt:
    return TextPrompt("once upon a time " * 1000 + end)


def _tokens(end: str) -> Prompt:
    return TokenPrompt((*range(10_000), len(end)))


def _chat(end: str) -> Prompt:
    return ChatPrompt(({"role": "user", "content": "hello " * 5000 + end},))


@pytest.mark.hostile
@pytest.mark.parametrize("prompt", [_text, _tokens, _chat])
def test_the_side_of_a_split_follows_from_the_beginning_of_a_long_prompt(prompt: Any) -> None:
    assert beginning_hash(prompt("and then")) == beginning_hash(prompt("x" * 100_000))
    assert beginning_hash(TextPrompt("a")) != beginning_hash(TextPrompt("b"))
