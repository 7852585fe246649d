import pytest

from launcher.ray_messages import (
    DrainFace,
    FaceEnded,
    FaceLine,
    FaceStarted,
    FlipFace,
    KillFace,
    Message,
    StartFace,
    decode,
    encode,
)


@pytest.mark.parametrize(
    "message",
    [
        StartFace(
            life=3,
            name="decode-0",
            argv=("python", "-m", "größe"),
            env={"A": "b"},
            ranks_of_bundles=(2, 2),
            uses_gpus=True,
            is_anywhere=False,
            stages=(("python", "-m", "stage"),),
            resource="pdserve_decode",
        ),
        DrainFace(life=1),
        FlipFace(life=4),
        KillFace(life=2),
        FaceStarted(life=1, pid=77),
        FaceLine(life=1, text='a "line" \U0001f5fc'),
        FaceEnded(life=1, status=-9),
    ],
)
def test_message_survives_the_wire(message: Message) -> None:
    assert decode(encode(message)) == message


def test_message_of_another_version_is_an_error() -> None:
    with pytest.raises(KeyError):
        decode(b'["Unheard", {}]')
