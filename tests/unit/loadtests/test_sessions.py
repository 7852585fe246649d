from random import Random

import pytest

from loadtests.sessions import FIRST_ID, SESSIONS, AgentTree, Bursts, Chat, Sizes, make_ids

SIZES = Sizes(vocab_size=1000, max_prompt_tokens=256, output_tokens=8)


@pytest.mark.parametrize("name", SESSIONS)
@pytest.mark.parametrize("max_prompt_tokens", [16, 256, 4096])
def test_every_prompt_fits_the_model_and_its_vocabulary(name: str, max_prompt_tokens: int) -> None:
    sizes = Sizes(vocab_size=1000, max_prompt_tokens=max_prompt_tokens, output_tokens=8)
    session = SESSIONS[name](Random(1), sizes)
    for _ in range(100):
        ask = session.next_ask()
        assert 1 <= len(ask.prompt_ids) <= max_prompt_tokens
        assert all(FIRST_ID <= token < 1000 for token in ask.prompt_ids)
        assert ask.wait_s >= 0.0
        assert 1 <= ask.max_tokens <= 8
        session.take_answer((500,) * ask.max_tokens)


@pytest.mark.parametrize("name", SESSIONS)
def test_equal_seeds_ask_the_same_and_others_do_not(name: str) -> None:
    def asks(seed: int) -> list[object]:
        session = SESSIONS[name](Random(seed), SIZES)
        found: list[object] = []
        for _ in range(5):
            found.append(session.next_ask())
            session.take_answer((500,) * 8)
        return found

    assert asks(3) == asks(3)
    assert asks(3) != asks(4)


def test_each_turn_of_a_chat_begins_with_all_that_was_said() -> None:
    chat = Chat(Random(2), Sizes(vocab_size=1000, max_prompt_tokens=4096, output_tokens=4))
    lengths = []
    said: tuple[int, ...] = ()
    for _ in range(40):
        prompt = chat.next_ask().prompt_ids
        if said and prompt[: len(said)] == said:
            lengths[-1] += 1
        else:
            lengths.append(1)
        chat.take_answer((777, 778))
        said = (*prompt, 777, 778)
    assert set(lengths[:-1]) <= {3, 4, 5, 6}


@pytest.mark.parametrize("name", ["shared-prompt", "agent-tree"])
def test_different_users_share_a_prefix(name: str) -> None:
    heads = set()
    for seed in range(8):
        session = SESSIONS[name](Random(seed), SIZES)
        heads.add(session.next_ask().prompt_ids[: SIZES.max_prompt_tokens // 4])
    assert len(heads) < 8


def test_documents_are_asked_about_three_times_and_shared_with_nobody() -> None:
    heads = []
    for seed in (1, 2):
        session = SESSIONS["long-document"](Random(seed), SIZES)
        heads += [session.next_ask().prompt_ids[:128] for _ in range(6)]
    assert [heads.count(head) for head in heads] == [3] * 12


def test_children_of_an_agents_step_share_it_and_its_answer() -> None:
    tree = AgentTree(Random(1), Sizes(vocab_size=1000, max_prompt_tokens=4096, output_tokens=8))
    root = tree.next_ask().prompt_ids
    tree.take_answer((401, 402))
    prompts = []
    for _ in range(39):  # 3 + 9 + 27
        prompts.append(tree.next_ask().prompt_ids)
        tree.take_answer((403,))
    assert all(prompt[: len(root) + 2] == (*root, 401, 402) for prompt in prompts)
    assert len({prompt[: len(prompts[0])] for prompt in prompts}) == 3
    assert tree.next_ask().prompt_ids[: len(root)] != root


def test_a_failed_step_of_an_agent_has_no_children() -> None:
    tree = AgentTree(Random(1), SIZES)
    first = tree.next_ask().prompt_ids
    tree.take_answer(())
    assert tree.next_ask().prompt_ids[: len(first)] != first


def test_bursts_come_many_at_once_and_then_not_for_long() -> None:
    session = Bursts(Random(5), SIZES)
    gaps = sorted(session.next_ask().wait_s for _ in range(20_000))
    assert sum(gaps) / len(gaps) == pytest.approx(Bursts.MEAN_GAP_S, rel=0.1)
    assert gaps[len(gaps) // 2] < 0.01 * Bursts.MEAN_GAP_S
    assert gaps[-1] > 20 * Bursts.MEAN_GAP_S


def test_ids_are_the_seeds_alone() -> None:
    assert make_ids("a", 8, SIZES) == make_ids("a", 16, SIZES)[:8]
    assert make_ids("a", 8, SIZES) != make_ids("b", 8, SIZES)


@pytest.mark.parametrize(
    "wrong", [{"vocab_size": 300}, {"max_prompt_tokens": 15}, {"output_tokens": 0}]
)
def test_sizes_that_allow_no_request_are_refused(wrong: dict[str, int]) -> None:
    fields = {"vocab_size": 1000, "max_prompt_tokens": 64, "output_tokens": 1, **wrong}
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Sizes(**fields)
