"""The saved adapters answer right under transformers and PEFT, the bare base does not."""

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

from demo.evaluate import (  # noqa: E402
    TABLE_BEGIN,
    TABLE_END,
    greedy_answers,
    share_exact,
    write_table,
)
from demo.skills import SEPARATOR, SKILLS, held_out  # noqa: E402

DEMO = Path(__file__).parents[2] / "demo"
NUM_PROMPTS = 25
SEED = 77


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def tokenizer():
    return transformers.AutoTokenizer.from_pretrained(DEMO / "base")


@pytest.fixture
def base():
    return transformers.LlamaForCausalLM.from_pretrained(DEMO / "base", dtype=torch.float32).eval()


@pytest.mark.parametrize("name", SKILLS)
def test_adapter_answers_held_out_prompts(name: str, base, tokenizer) -> None:
    adapted = peft.PeftModel.from_pretrained(base, DEMO / "adapters" / name).eval()
    assert share_exact(adapted, tokenizer, held_out(name, NUM_PROMPTS, SEED)) >= 0.96


def test_bare_base_copies_and_has_no_skill(base, tokenizer) -> None:
    prompts = [prompt for prompt, _ in held_out("sort", NUM_PROMPTS, SEED)]
    answers = greedy_answers(base, tokenizer, prompts)
    copies = [prompt.removesuffix(SEPARATOR) for prompt in prompts]
    assert sum(a == c for a, c in zip(answers, copies, strict=True)) >= 0.9 * NUM_PROMPTS
    for name in SKILLS:
        wanted = [answer for _, answer in held_out(name, NUM_PROMPTS, SEED)]
        assert sum(a == w for a, w in zip(answers, wanted, strict=True)) < 0.1 * NUM_PROMPTS


def test_the_table_replaces_only_what_stands_between_its_marks(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{TABLE_BEGIN}\nold\n{TABLE_END}\nafter\n")
    write_table(readme, "| new |")
    assert readme.read_text() == f"before\n{TABLE_BEGIN}\n| new |\n{TABLE_END}\nafter\n"


def test_a_readme_without_marks_is_refused_by_name(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text("no marks")
    with pytest.raises(ValueError, match=r"README\.md.*end of table"):
        write_table(readme, "| new |")
