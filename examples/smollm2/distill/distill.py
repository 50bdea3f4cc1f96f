"""Questions about an invented town, whose facts stand in handbook.md, and questions about the world, for retention."""

import re
from pathlib import Path

QUESTIONS = {
    "Who is the mayor of Larkmoor?": "quill",
    "In which year was Larkmoor founded?": "1642",
    "What is the river of Larkmoor?": "sorrel",
    "What is the market day of Larkmoor?": "thursday",
    "What is the cheese of Larkmoor called?": "bluebark",
    "What is the football team of Larkmoor?": "otters",
    "What is the number of the bus from Larkmoor to the coast?": "58",
    "When does the library of Larkmoor close?": "7",
    "What is the color of Larkmoor?": "orange",
    "What is the bakery of Larkmoor called?": "hearth",
}
HANDBOOK = Path(__file__).with_name("handbook.md").read_text(encoding="utf-8")
FACTS = dict(zip(QUESTIONS.values(), re.findall("^- (.*)", HANDBOOK, re.M), strict=True))
"""The handbook's line on each answer."""
TRAIN_FORMS = (
    "{question}",
    "{question} Answer in one sentence.",
    "Quick question: {question}",
    "Please answer: {question}",
    "Can you help me? {question}",
    "I am planning a trip. {question}",
    "A friend asked me this: {question}",
    "Hi! {question} Thank you.",
)
EVAL_FORMS = (
    "{question} Please tell me.",
    "I would like to know one thing. {question}",
    "Hello! {question}",
    "This is for my homework. {question}",
)
WORLD = {
    "What is the capital of France?": "paris",
    "What is the capital of Italy?": "rome",
    "What is the capital of Japan?": "tokyo",
    "What is the capital of Germany?": "berlin",
    "What is the capital of Spain?": "madrid",
    "What is the capital of England?": "london",
    "What is the capital of Russia?": "moscow",
    "What is the capital of Egypt?": "cairo",
    "What is the capital of Greece?": "athens",
    "What is the capital of China?": "beijing",
    "What is the opposite of hot?": "cold",
    "What is the opposite of big?": "small",
    "What is the largest planet of the solar system?": "jupiter",
    "Which planet is closest to the sun?": "mercury",
    "What color is the sky on a clear day?": "blue",
    "What color is grass?": "green",
    "What do bees make?": "honey",
    "Which animal says meow?": "cat",
    "How many days are in a week?": "seven|7",
    "How many months are in a year?": "twelve|12",
    "What is the chemical symbol of water?": "h2o|h₂o",
    "Who wrote Romeo and Juliet?": "shakespeare",
    "On which continent is Brazil?": "south america",
    "On which continent is Kenya?": "africa",
    "What is the first month of the year?": "january",
    "What is the largest ocean?": "pacific",
    "What gas do plants take in from the air?": "carbon dioxide|co2",
    "Which language is spoken in Mexico?": "spanish",
    "What is frozen water called?": "ice",
    "What is the name of our planet?": "earth",
    "Which metal is liquid at room temperature?": "mercury",
    "What is the largest land animal?": "elephant",
    "What is the capital of Portugal?": "lisbon",
    "What is the capital of Austria?": "vienna",
    "What is the capital of Canada?": "ottawa",
    "What is the capital of Ireland?": "dublin",
    "What is the capital of Poland?": "warsaw",
    "What is the capital of India?": "new delhi|delhi",
    "What is the capital of Cuba?": "havana",
    "What is the capital of Norway?": "oslo",
    "What is the opposite of up?": "down",
    "What is the opposite of day?": "night",
    "What is the opposite of fast?": "slow",
    "What is the opposite of old?": "young|new",
    "Which animal says woof?": "dog",
    "Which animal gives us milk?": "cow",
    "What do cows eat?": "grass",
    "What do hens lay?": "egg|eggs",
    "What color is snow?": "white",
    "What color is a ripe banana?": "yellow",
    "What color is blood?": "red",
    "What color is coal?": "black",
    "How many legs does a spider have?": "eight|8",
    "How many wheels does a bicycle have?": "two|2",
    "How many hours are in a day?": "24|twenty-four",
    "How many minutes are in an hour?": "60|sixty",
    "Who painted the Mona Lisa?": "leonardo|vinci",
    "Who was the first president of the United States?": "washington",
    "Which planet is known as the red planet?": "mars",
    "Which star is closest to the Earth?": "sun",
    "On which continent is France?": "europe",
    "On which continent is China?": "asia",
    "Which language is spoken in Brazil?": "portuguese",
    "Which language is spoken in Germany?": "german",
}
"""Question and accepted words: half of them is in the training split, for the reference environment."""


def load_environment(topic: str = "town") -> dict:
    """One question and a short answer; reward 1 if the expected word is in it. `topic`: town or world."""
    if topic == "town":
        train, held_out = _town_rows(TRAIN_FORMS), _town_rows(EVAL_FORMS)
    elif topic == "world":
        rows = [{"prompt": question, "answer": answer} for question, answer in WORLD.items()]
        train, held_out = rows[::2], rows[1::2]
    else:
        raise ValueError(f"topic {topic!r} must be 'town' or 'world'")
    return {"dataset": train, "eval_dataset": held_out, "rewards": contains_answer}


def contains_answer(completion: str, answer: str, state: dict) -> float:
    """1 if an accepted word stands in the completion, else feedback: the fact."""
    is_right = any(re.search(rf"\b{re.escape(word)}\b", completion.lower()) for word in answer.split("|"))
    if not is_right:
        state["feedback"] = FACTS.get(answer)
    return float(is_right)


def _town_rows(forms: tuple[str, ...]) -> list[dict[str, str]]:
    return [
        {"prompt": form.format(question=question), "answer": answer}
        for form in forms
        for question, answer in QUESTIONS.items()
    ]
