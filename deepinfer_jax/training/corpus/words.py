"""The word lists of the corpus."""

SHE_NAMES = (
    "Mia", "Lily", "Anna", "Zoe", "Ruby", "Nora", "Emma", "Ella", "Ivy", "Lucy", "Rosa", "Hana",
    "Sara", "Clara", "Nina",
)  # fmt: skip
HE_NAMES = (
    "Tom", "Ben", "Leo", "Max", "Sam", "Finn", "Jack", "Noah", "Oscar", "Theo", "Hugo", "Omar",
    "Paul", "Eric", "Ravi",
)  # fmt: skip
NAMES = SHE_NAMES + HE_NAMES

ANIMALS = (
    "cat", "dog", "fox", "bear", "rabbit", "mouse", "owl", "duck", "frog", "horse", "pig", "lion",
    "turtle", "squirrel", "hedgehog", "goat", "sheep", "penguin", "elephant", "monkey", "tiger",
    "hen", "wolf", "deer",
)  # fmt: skip
SHE_PEOPLE = ("girl", "queen", "princess")
HE_PEOPLE = ("boy", "king", "prince")
PEOPLE = (
    "robot", "dragon", "farmer", "sailor", "baker", "knight", "wizard", "pirate", "teacher",
    "painter", "giant", "fairy",
)  # fmt: skip
HEROES = ANIMALS + SHE_PEOPLE + HE_PEOPLE + PEOPLE

THINGS = (
    "kite", "ball", "boat", "drum", "hat", "book", "lamp", "bell", "key", "map", "cake", "apple",
    "balloon", "box", "bike", "star", "stone", "flower", "feather", "scarf", "basket", "umbrella",
    "coin", "ring", "flute", "clock", "candle", "letter", "wagon", "blanket", "shell", "button",
    "rope", "bucket", "spoon", "pumpkin", "violin", "puzzle", "cup", "mirror", "doll", "train",
    "lantern", "brush", "whistle", "crown", "pillow", "egg",
)  # fmt: skip
COLORS = (
    "red", "blue", "green", "yellow", "white", "black", "orange", "purple", "pink", "brown",
)  # fmt: skip
PLACES = (
    "in the park", "in the forest", "at the beach", "in the garden", "on the hill",
    "by the river", "at the market", "on the farm", "by the lake", "in the meadow",
    "in the village", "near the old mill", "by the bridge", "in the valley",
)  # fmt: skip
CITIES = (
    "Paris", "London", "Rome", "Berlin", "Madrid", "Tokyo", "Cairo", "Lima", "Oslo", "Vienna",
    "Delhi", "Boston", "Dublin", "Athens", "Seoul", "Sydney",
)  # fmt: skip
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS = (
    "January", "February", "March", "April", "May", "June", "July", "August", "September",
    "October", "November", "December",
)  # fmt: skip
JOBS = (
    "teacher", "baker", "farmer", "painter", "sailor", "doctor", "singer", "driver", "nurse",
    "writer",
)  # fmt: skip
FOODS = (
    "bread", "soup", "rice", "cheese", "honey", "pasta", "salad", "pizza", "fruit", "milk",
)  # fmt: skip
EVENTS = ("concert", "party", "meeting", "race", "picnic", "lesson", "match", "wedding", "show")

SORTABLE = (
    "apple", "ant", "ball", "bear", "cake", "cat", "dog", "drum", "egg", "elephant", "fig", "fox",
    "goat", "grape", "hat", "horse", "ice", "island", "jam", "jar", "key", "kite", "lamp", "lion",
    "map", "mouse", "nest", "nut", "orange", "owl", "pear", "pig", "queen", "rabbit", "ring",
    "star", "sun", "tiger", "tree", "umbrella", "van", "violin", "water", "wolf", "yarn", "zebra",
)  # fmt: skip


def a(noun: str) -> str:
    """The noun with its indefinite article."""
    return ("an " if noun[0] in "aeiou" else "a ") + noun
