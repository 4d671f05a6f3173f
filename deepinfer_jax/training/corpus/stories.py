"""Short stories from templates: a hero, a friend, a thing, one of nine plots.

A plot is a list of beats; a beat is a tuple of sentences of which one is told. Their fields: H name
and K kind of the hero, they/them/their of the hero; F and G, fthey/fthem/ftheir the same of the
friend; T the thing with its color, t the bare thing, a_T with its article; place.
"""

import functools
import re

from deepinfer_jax.training.corpus import words
from deepinfer_jax.training.corpus.draw import Draw
from deepinfer_jax.training.corpus.example import Example, Task, effort_of, final_part, user

_OPENINGS = (
    "Once upon a time, there was {a_K} named {H}.",
    "Once there was a little {K} named {H}.",
    "{H} was a kind {K} who lived {home}.",
    "Once upon a time, a {mood} {K} named {H} lived {home}.",
)
_HOMES = (
    "near the forest", "by the sea", "in a small house", "on a quiet farm", "in a green valley",
    "next to the river", "at the edge of the village", "under a tall tree",
)  # fmt: skip
_MOODS = ("happy", "brave", "shy", "curious", "clever", "gentle", "cheerful")
_TIMES = (
    "One sunny morning", "One windy day", "One cold evening", "One bright afternoon",
    "One rainy day", "One quiet morning", "The next day", "Early one day",
)  # fmt: skip
_HIDING = (
    "under a big leaf", "behind a rock", "inside an old box", "under a bench", "behind a tree",
    "in the tall grass", "next to a fence", "under a pile of leaves",
)  # fmt: skip
_ENDINGS = (
    "From that day on, {H} and {F} were best friends.",
    "That night, {H} fell asleep with a smile.",
    "{H} never forgot that day.",
    "{H} and {F} laughed and walked home together.",
    "They were happy for the rest of the day.",
    "{H} felt warm and happy inside.",
)
_PLOTS = {
    "lost": (
        (
            "{H} loved {their} {T} more than anything.",
            "{H} had {a_T} and took it everywhere.",
            "{Their} favorite thing was {a_T}.",
        ),
        (
            "{time}, {H} went to play {place}, but then the {t} was gone.",
            "{time}, {they} lost the {t} {place}.",
        ),
        (
            "{H} looked up and down, but could not find it.",
            "{They} looked everywhere and began to cry.",
            "{H} felt very sad.",
        ),
        (
            'A {G} named {F} came by and asked, "Why are you so sad?"',
            'Then {F} the {G} came along and said, "What is wrong?"',
        ),
        (
            '"I lost my {t}," said {H}.',
            '"My {t} is gone," {H} said softly.',
        ),
        (
            '"I will help you," said {F}.',
            '"Let us look for it together," {F} said.',
        ),
        (
            "They looked and looked, and at last {F} found the {t} {hiding}.",
            "After a long time, {H} saw something {color} {hiding}. It was the {t}!",
        ),
        (
            '"Thank you!" said {H}, and gave {F} a big hug.',
            '{H} jumped with joy and said, "Thank you, {F}!"',
        ),
    ),
    "found": (
        (
            "{time}, {H} went for a walk {place}.",
            "{time}, {they} played {place}.",
        ),
        (
            "There {they} saw {a_T} {hiding}.",
            "Suddenly {H} found {a_T} {hiding}.",
        ),
        (
            '"Whose {t} is this?" {H} wondered.',
            '"What a pretty {t}!" said {H}. "But it is not mine."',
        ),
        (
            "{H} wanted to keep it, but {they} knew that someone must be missing it.",
            "{They} asked everyone, but nobody knew.",
        ),
        (
            "Then {H} met {F} the {G}, who looked very sad.",
            "At last {H} saw a {G} named {F}, who was looking for something.",
        ),
        (
            '"Is this your {t}?" asked {H}.',
            '{H} showed the {t} and asked, "Did you lose this?"',
        ),
        (
            '"Yes! You found my {t}!" said {F}.',
            '"Oh, thank you! I looked for it all day," said {F}.',
        ),
        (
            "{F} was so happy that {fthey} shared a sweet cake with {H}.",
            "{F} let {H} play with the {t} too.",
        ),
    ),
    "stuck": (
        (
            "{time}, {H} took {a_T} and went to play {place}.",
            "{time}, {H} was {place} with {a_T}.",
        ),
        (
            "A strong wind blew, and the {t} flew up into a tall tree.",
            "{They} threw the {t} too high, and it got stuck in a tree.",
        ),
        (
            "{H} jumped and jumped, but {they} could not reach it.",
            "{They} tried to climb, but the tree was too tall.",
        ),
        (
            '"Oh no, my {t}!" cried {H}.',
            "{H} sat down and felt sad.",
        ),
        (
            "A {G} named {F} saw {them} and had an idea.",
            'Just then {F} the {G} came by. "I have an idea," said {F}.',
        ),
        (
            "{F} found a long stick and gave it to {H}.",
            "{F} stood still, and {H} climbed on {ftheir} back.",
        ),
        (
            "They pushed the branch, and the {t} fell down.",
            "Together they shook the branch until the {t} came down.",
        ),
        (
            '"We did it!" said {H}.',
            '"Working together is better," said {F}.',
        ),
    ),
    "gift": (
        (
            "{H} had a good friend, a {G} named {F}.",
            "{Their} best friend was {F} the {G}.",
        ),
        (
            "It was the birthday of {F}, and {H} wanted to give {fthem} a present.",
            "{F} was sick in bed, and {H} wanted to make {fthem} smile.",
        ),
        (
            "{time}, {H} went to look for a gift {place}.",
            "{time}, {they} looked for something nice {place}.",
        ),
        (
            "{They} saw many things, but nothing was right.",
            "{H} looked for a long time.",
        ),
        (
            "Then {they} found {a_T}.",
            "At last {they} saw {a_T} and smiled.",
        ),
        (
            '"This {t} is perfect for {F}," {H} thought.',
            '"{F} will love this {t}," said {H}.',
        ),
        (
            "{H} took it home, put it in a box, and brought it to {F}.",
            "{They} ran all the way to {F} and gave {fthem} the {t}.",
        ),
        (
            '"What a wonderful {t}! Thank you!" said {F}.',
            "{F} smiled and held the {t} close.",
        ),
    ),
    "share": (
        (
            "{time}, {H} and {F} the {G} played {place}.",
            "{time}, {H} met a {G} named {F} {place}.",
        ),
        (
            "They both saw {a_T} at the same time.",
            "There they found {a_T}.",
        ),
        (
            '"It is mine!" said {H}. "No, it is mine!" said {F}.',
            '"I saw the {t} first!" said {H}. "No, I did!" said {F}.',
        ),
        (
            "They pulled and pulled, and both were angry.",
            "They did not talk to each other for a long time.",
        ),
        (
            "Then {H} felt sorry.",
            "But {H} did not like to fight.",
        ),
        (
            '"We can share the {t}," said {H}.',
            '"You can have the {t} first, and then it is my turn," said {H}.',
        ),
        (
            '"That is a good idea," said {F}. "I am sorry too."',
            '{F} smiled and said, "Yes, let us share."',
        ),
        (
            "They played together until the sun went down.",
            "Sharing the {t} was much more fun.",
        ),
    ),
    "storm": (
        (
            "{time}, {H} carried {a_T} home from a long walk.",
            "{time}, {H} was on {their} way home with {a_T}.",
        ),
        (
            "Suddenly the sky turned dark, and it began to rain.",
            "Then a big storm came, and the wind was loud.",
        ),
        (
            "{H} was scared and held the {t} close.",
            "{They} hid the {t} under {their} coat and ran.",
        ),
        (
            "{They} saw a small light {place}.",
            "There was a little house {place}.",
        ),
        (
            "{H} knocked on the door, and {F} the {G} opened it.",
            "A {G} named {F} lived there and opened the door.",
        ),
        (
            '"Come in, you are all wet!" said {F}.',
            '"Come in and get warm," {F} said.',
        ),
        (
            "They drank hot tea and listened to the rain.",
            "{F} made warm soup, and they told each other stories.",
        ),
        (
            "When the storm was over, {H} gave {F} the {t} to say thank you.",
            "In the morning the sun was out, and {H} showed {F} the {t}.",
        ),
    ),
    "fair": (
        (
            "There was a big fair {place}, and everyone could show one special thing.",
            "Every year there was a fair {place}.",
        ),
        (
            "{H} wanted to bring {their} {T}.",
            "{H} had only {a_T} to show.",
        ),
        (
            '"My {t} is not good enough," {they} thought.',
            "{They} felt small and afraid.",
        ),
        (
            '{F} the {G} said, "Your {t} is special because it is yours."',
            'But {their} friend {F}, a {G}, said, "Be brave. I like your {t}."',
        ),
        (
            "{time}, {H} went to the fair with the {t}.",
            "So {H} took a deep breath and went.",
        ),
        (
            "{They} told everyone the story of the {t}.",
            "{H} stood up and showed the {t} to all.",
        ),
        (
            "Everyone clapped and cheered.",
            "All the people smiled, and {F} cheered the most.",
        ),
        (
            '"I am proud of you," said {F}.',
            "{H} was very proud.",
        ),
    ),
    "borrow": (
        (
            "{F} the {G} had {a_T}.",
            "{Their} friend, a {G} named {F}, had {a_T}.",
        ),
        (
            '"May I borrow your {t}?" asked {H}. "Yes, but please be careful," said {F}.',
            '{time}, {H} asked, "Can I play with your {t}?" and {F} said yes.',
        ),
        (
            "{H} played with the {t} {place} all day.",
            "{H} took it and played {place}.",
        ),
        (
            "But {they} left it outside in the rain.",
            "Then {they} dropped it, and it got dirty.",
        ),
        (
            "{H} felt bad and did not know what to do.",
            "{They} wanted to hide it.",
        ),
        (
            "In the end {they} told the truth.",
            "But {H} knew that it is best to tell the truth.",
        ),
        (
            '"I am sorry about your {t}," said {H}.',
            '"I was not careful with your {t}. I am sorry," said {H}.',
        ),
        (
            '"Thank you for telling me. We can clean it together," said {F}.',
            "{F} was not angry, and they cleaned the {t} together.",
        ),
    ),
    "magic": (
        (
            "{time}, {H} found {a_T} {hiding}.",
            "{time}, an old woman gave {H} {a_T}.",
        ),
        (
            "It was not a normal {t}. It could talk!",
            'When {H} touched it, the {t} began to shine. "Hello," it said.',
        ),
        (
            '"I can give you one wish," said the {t}.',
            '"Make one wish, and I will make it come true," said the {t}.',
        ),
        (
            "{H} thought about gold and toys and cakes.",
            "{H} did not know what to wish for.",
        ),
        (
            "Then {they} saw {F} the {G}, who sat alone {place}.",
            "Then {they} thought of a lonely {G} named {F}, who lived {home}.",
        ),
        (
            '"I wish that {F} is happy," said {H}.',
            '"I wish that {F} has a friend," said {H}.',
        ),
        (
            "The {t} glowed, and soon {F} came to {H} with a big smile.",
            'The {t} said, "You can do that yourself. Just say hello."',
        ),
        (
            'So {H} said, "Hello, {F}! Do you want to play?"',
            '"Will you play with me?" {H} asked, and {F} said yes.',
        ),
    ),
}
_PLOT_NOTES = {
    "lost": "{H} loses the {t} and {F} helps to find it",
    "found": "{H} finds the {t} and gives it back to {F}",
    "stuck": "the {t} gets stuck in a tree and {F} helps",
    "gift": "{H} gives the {t} to {F}",
    "share": "{H} and {F} learn to share the {t}",
    "storm": "{H} carries the {t} through a storm and meets {F}",
    "fair": "{H} shows the {t} at the fair and {F} cheers",
    "borrow": "{H} borrows the {t} from {F} and tells the truth",
    "magic": "the {t} is magic and {H} makes a wish for {F}",
}
_FOOD = ("cake", "apple", "pumpkin", "egg")
_LIGHT = (
    "kite", "ball", "hat", "balloon", "feather", "scarf", "letter", "doll", "map", "umbrella",
    "rope", "blanket",
)  # fmt: skip
_LARGE = ("bike", "wagon", "boat", "ladder", "mirror", "train", "umbrella", "star")
_PROMPTS = ("Tell me a story about {a_K} and {a_t}.",) * 4 + (
    "Write a short story about {a_K} and {a_t}.",
    "Tell me a story about {a_K} named {H} and {a_t}.",
    "Tell me a story about {H} the {K} and {a_T}.",
    "Please tell me a story about {a_K} and {a_T}.",
    "Tell me a story about {a_K}.",
    "Tell me a story.",
)


def tells_about(subjects: tuple[str, ...], completion: str) -> bool:
    """Check: a finished story of five sentences or more that names every subject, repeats none."""
    text = final_part(completion)
    sentences = re.findall(r"[^.!?]+[.!?]", text)
    told = set(re.findall(r"[a-z]+", text.lower()))
    return (
        text.endswith("The end.")
        and len(sentences) >= 5
        and len(set(sentences)) == len(sentences)
        and all(subject in told for subject in subjects)
    )


def _gender(draw: Draw, kind: str) -> bool:
    """Whether a character is a she."""
    if kind in words.SHE_PEOPLE or kind in words.HE_PEOPLE:
        return kind in words.SHE_PEOPLE
    return draw.chance(0.5)


def _cast(draw: Draw, kind: str, thing: str) -> dict[str, str]:
    """The fields of one story."""
    friend_kind = draw.pick(words.ANIMALS)
    while friend_kind == kind or friend_kind[0] in "aeiou":
        friend_kind = draw.pick(words.ANIMALS)
    she, fshe = _gender(draw, kind), draw.chance(0.5)
    hero = draw.pick(words.SHE_NAMES if she else words.HE_NAMES)
    friend = draw.pick(words.SHE_NAMES if fshe else words.HE_NAMES)
    while friend == hero:
        friend = draw.pick(words.SHE_NAMES if fshe else words.HE_NAMES)
    color = draw.pick(words.COLORS)
    they, them, their = ("she", "her", "her") if she else ("he", "him", "his")
    fthey, fthem, ftheir = ("she", "her", "her") if fshe else ("he", "him", "his")
    return {
        "H": hero, "K": kind, "a_K": words.a(kind), "F": friend, "G": friend_kind,
        "they": they, "them": them, "their": their, "They": they.title(), "Their": their.title(),
        "fthey": fthey, "fthem": fthem, "ftheir": ftheir,
        "t": thing, "a_t": words.a(thing), "T": f"{color} {thing}",
        "a_T": words.a(f"{color} {thing}"), "color": color,
        "place": draw.pick(words.PLACES), "home": draw.pick(_HOMES), "mood": draw.pick(_MOODS),
        "time": draw.pick(_TIMES), "hiding": draw.pick(_HIDING),
    }  # fmt: skip


@functools.cache
def _plots_of(thing: str) -> tuple[str, ...]:
    """The plots in which this thing makes sense."""
    unfit = {"stuck": thing not in _LIGHT, "storm": thing in _LARGE, "borrow": thing in _FOOD}
    return tuple(plot for plot in _PLOTS if not unfit.get(plot, False))


def _draw_story(draw: Draw) -> tuple:
    return (draw.pick(words.HEROES), draw.pick(words.THINGS))


def _build_story(draw: Draw, combination: tuple) -> Example:
    kind, thing = combination
    cast = _cast(draw, kind, thing)
    plot = draw.pick(_plots_of(thing))
    beats = (_OPENINGS, *_PLOTS[plot], _ENDINGS)
    story = " ".join([draw.pick(beat) for beat in beats]).format_map(cast) + " The end."
    prompt = draw.pick(_PROMPTS)
    subjects = tuple(
        word for field, word in (("K}", kind), ("t}", thing), ("T}", thing)) if field in prompt
    )
    reasoning, effort = None, effort_of(draw)
    if draw.chance(0.4):
        note = _PLOT_NOTES[plot]
        about = "A story about {a_K} and {a_t}. " if effort > 50 else ""
        names = "The {K} is {H}. The friend is {F} the {G}. " if effort > 50 else ""
        reasoning = (about + names + f"Plot: {note}.").format_map(cast)
    return Example(
        task="story",
        prompt_messages=user(prompt.format_map(cast)),
        answer=story,
        check=functools.partial(tells_about, subjects),
        reasoning=reasoning,
        effort=effort,
    )


STORY = Task("story", 24, _draw_story, _build_story)
