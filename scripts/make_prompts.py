"""Prompts made up from lists, to have a target write text for a draft head: JSONL on stdout, one chat a line.

    .venv/bin/python scripts/make_prompts.py --count 4000 > prompts.jsonl

Every kind of prompt (letters, stories, explanations, advice, sums, code, summaries, facts, roles) is as frequent as its
share says, no prompt comes twice, and the same count and seed give the same file. Nothing is taken from a benchmark.
"""

import argparse
import json
import random
import sys
from collections.abc import Callable, Iterator

from jaxspec import cli

TOPICS = """learning to swim|keeping bees|the history of bread|moving to a new city|solar panels|public libraries
growing tomatoes|the French Revolution|black holes|electric cars|a first job|learning the piano|climate change
healthy breakfasts|the moon landing|recycling plastic|online privacy|chess openings|the water cycle|volcanoes
running a small shop|vaccines|the Silk Road|remote work|dog training|a balanced budget|photosynthesis|the stock market
ancient Egypt|public speaking|earthquakes|making friends|city parks|the human heart|wind power|saving money
the Roman army|jazz music|camping in winter|artificial intelligence|coffee|the ocean floor|bicycle repair
time management|the printing press|coral reefs|learning a language|school uniforms|space telescopes|good sleep
the steam engine|antibiotics|a school play|mountain climbing|computer viruses|the tides|painting a room|inflation
the immune system|fishing villages|knitting|paper money|the Great Wall of China|honey|glaciers|train travel
a job interview|the solar system|cooking rice|team sports|the invention of the telephone|desert animals|gravity
moving house|a vegetable garden|robots|writing a diary|the rain forest|magnets|stage fright|migrating birds
the Olympic Games|rivers and dams|blood pressure|clean drinking water|the periodic table|sailing|old maps
board games|the brain and memory|lightning|a family budget|penguins|chocolate|evolution|DNA|street food
the Industrial Revolution|stress at work|yoga|video games|bridges|the speed of light|tea|a power cut""".replace(
    "\n", "|"
).split("|")
PEOPLE = """a teacher|a nurse|a ship's captain|an old librarian|a travel guide|a chef|a detective|a football coach
a scientist|a farmer|a kind grandmother|a museum guard|a pilot|a gardener|a doctor|a poet|a robot|a lawyer
a historian|a mechanic|a musician|a news reporter|a park ranger|a software engineer""".replace("\n", "|").split("|")
NAMES = """Anna|Ben|Clara|David|Emma|Felix|Grace|Hassan|Ivy|Jack|Karen|Liam|Maria|Noah|Olga|Peter|Quinn|Rosa|Sam|Tara
Uma|Victor|Wendy|Yusuf|Zoe|Aisha|Bruno|Chen|Diego|Elif""".replace("\n", "|").split("|")
THINGS = """apples|books|pencils|marbles|stickers|cookies|stamps|shells|cards|flowers|balloons|bottles|tickets|coins
eggs|toys|shirts|candles|oranges|cupcakes""".replace("\n", "|").split("|")
PLACES = """a lighthouse|a small village|a space station|an old library|a busy kitchen|a night train|a quiet island
a mountain hut|a school|a market|a forest|a museum|a harbour|a castle|a desert town|a hospital""".replace(
    "\n", "|"
).split("|")
CREATURES = """a dragon|a lost dog|a young inventor|two sisters|a clever fox|a tired king|a shy girl|a brave mouse
an honest thief|a talking tree|a retired sailor|a lonely robot|a street musician|a curious boy""".replace(
    "\n", "|"
).split("|")
TASKS = """returns the sum of the even numbers in a list|counts the vowels in a string|checks whether a string is a
palindrome|returns the largest of three numbers|reverses the words of a sentence|removes duplicates from a list and
keeps their order|computes the factorial of a number|returns the first n prime numbers|finds the second largest number
in a list|merges two sorted lists|counts how often each word occurs in a text|converts Celsius to Fahrenheit|checks
whether two words are anagrams|returns the longest word of a sentence|flattens a list of lists|computes the greatest
common divisor of two numbers|rotates a list by k places|finds all pairs of numbers that add up to a target|returns the
average of a list of numbers|checks whether a number is a power of two|capitalises every word of a string|returns the
transpose of a matrix|finds the missing number between 1 and n|computes the n-th triangular number|splits a list into
chunks of a given size|removes all digits from a string|returns the index of the smallest element|checks whether a list
is sorted|converts an integer to binary|counts the words of a file|returns the keys of a dictionary sorted by their
values|finds the common elements of two lists|computes the distance between two points|groups words by their first
letter|validates an email address|returns every second element of a list|computes compound interest|searches a sorted
list by bisection|sorts a list of tuples by their second item|checks whether brackets are balanced""".replace(
    "\n", " "
).split("|")
FACTS = """What is the capital of {}?|Which languages are spoken in {}?|What is {} famous for?|Name three cities in {}.
Describe the climate of {}.|What should a visitor see in {} in three days?|Which countries border {}?
What do people in {} like to eat?""".replace("\n", "|").split("|")
COUNTRIES = """France|Japan|Brazil|Egypt|Canada|India|Spain|Kenya|Norway|Mexico|Italy|Vietnam|Peru|Turkey|Greece|Ireland
Poland|Thailand|Morocco|Chile|Sweden|Portugal|Australia|Germany|Indonesia|Argentina""".replace("\n", "|").split("|")

TEXTS = (
    "Write a short email to {person} about {topic}.",
    "Write a blog post about {topic}.",
    "Write an introduction for a talk about {topic}.",
    "Write a poem about {topic}.",
    "Write a letter to the city council about {topic}, and keep it polite.",
    "Draft a short speech about {topic} for {person}.",
    "Write a product description for a book about {topic}.",
)
STORIES = (
    "Write a short story about {creature} in {place}.",
    "Tell me a bedtime story about {creature}.",
    "Begin a mystery that takes place in {place}.",
    "Write a dialogue between {creature} and {person} in {place}.",
    "Describe {place} at sunrise, in one paragraph.",
)
EXPLANATIONS = (
    "Explain {topic} to a child.",
    "What are the most important facts about {topic}?",
    "What are the advantages and disadvantages of {topic}?",
    "How has {topic} changed over the years?",
    "Why does {topic} matter? Give three reasons.",
    "Give me a short overview of {topic}, with examples.",
    "What are common mistakes people make about {topic}?",
    "Compare {topic} and {other}.",
    "Is there a connection between {topic} and {other}? Explain your answer.",
)
ADVICE = (
    "Give me five tips about {topic}.",
    "How do I start with {topic}?",
    "Make a plan for one week about {topic}.",
    "Which questions should I ask an expert about {topic}?",
    "List ten words that have to do with {topic}, and explain each.",
    "Suggest three activities for a class about {topic}.",
)
ROLES = (
    "Pretend to be {person} and tell me about {topic}.",
    "You are {person}. A visitor asks about {topic}. What do you say?",
    "Act as {person} and give your opinion on {topic}.",
)
SUMS = (
    "{name} has {a} {thing} and buys {b} more, then gives {c} to {friend}. How many {thing} does {name} have left?",
    "{name} sells {a} {thing} on Monday and {b} times as many on Tuesday. How many {thing} is that in total?",
    "A box holds {b} {thing}. {name} has {c} boxes and {a} loose {thing}. How many {thing} are there altogether?",
    "{name} earns ${b} an hour and works {c} hours a day for {d} days. How much money does {name} earn?",
    "{thing} cost ${b} each. {name} buys {c} of them and pays with a $100 note. How much change does {name} get?",
    "{name} and {friend} collect {thing}. {name} has {a}, and {friend} has {c} fewer. How many do they have together?",
    "A train travels {a} miles in {d} hours. At the same speed, how far does it travel in {c} hours?",
    "{name} reads {b} pages on weekdays and {c} pages on each day of the weekend. How many pages is that in {d} weeks?",
    "There are {a} {thing} in a bag. A quarter of them are red and the rest are blue. How many are blue?",
    "{name} is {c} years older than {friend}. In {d} years {friend} will be {a}. How old is {name} now?",
    "{name} shares {a} {thing} equally between {d} friends. How many does each get, and how many are left over?",
)
CODE = (
    "Write a Python function that {task}.",
    "Write a Python function that {task}, with a docstring and two examples.",
    "How can I write a program that {task}? Explain each step.",
    "Write a JavaScript function that {task}.",
    'Complete this function:\n\ndef solve(value):\n    """A function that {task}."""\n',
    "Write three tests for a function that {task}.",
)
REWRITES = (
    "Summarize this text in two sentences: {text}",
    "Rewrite this text so that a child understands it: {text}",
    "Find the names and numbers in this text: {text}",
    "Correct the mistakes in this text, if there are any: {text}",
    "Answer the question with the help of the text.\n\nText: {text}\n\nQuestion: What is the text about?",
    "Translate this text into French: {text}",
)
SENTENCES = (
    "Last {day} {name} went to {place} to learn more about {topic}.",
    "At first there were only {a} visitors, but by noon {b} more had come.",
    "{name} said that {topic} was easier than most people think.",
    "{friend}, who works as {person}, did not agree and asked many questions.",
    "The tickets cost ${c} each, and the money went to a school nearby.",
    "In the evening they talked about {other} until it was dark.",
    "Nobody expected that the plan would take {d} years.",
    "A reporter wrote about it in the local paper the next morning.",
)
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")


def words(rng: random.Random) -> dict[str, object]:
    """A choice of everything that the templates may name."""
    topic, other = rng.sample(TOPICS, 2)
    name, friend = rng.sample(NAMES, 2)
    return {
        "topic": topic,
        "other": other,
        "name": name,
        "friend": friend,
        "person": rng.choice(PEOPLE),
        "creature": rng.choice(CREATURES),
        "place": rng.choice(PLACES),
        "thing": rng.choice(THINGS),
        "task": rng.choice(TASKS),
        "day": rng.choice(DAYS),
        "a": rng.randint(20, 96),
        "b": rng.randint(3, 19),
        "c": rng.randint(2, 12),
        "d": rng.randint(2, 6),
    }


def filled(*templates: str) -> Callable[[random.Random], str]:
    """One of the templates with words in it; the first letter is large."""

    def make(rng: random.Random) -> str:
        text = rng.choice(templates).format(**words(rng))
        return text[0].upper() + text[1:]

    return make


def about_a_country(rng: random.Random) -> str:
    return rng.choice(FACTS).format(rng.choice(COUNTRIES))


def about_a_text(rng: random.Random) -> str:
    chosen = words(rng)
    sentences = rng.sample(SENTENCES, rng.randint(3, 6))
    return rng.choice(REWRITES).format(text=" ".join(sentence.format(**chosen) for sentence in sentences))


# How often, and what.
KINDS: tuple[tuple[int, Callable[[random.Random], str]], ...] = (
    (14, filled(*TEXTS)),
    (12, filled(*STORIES)),
    (18, filled(*EXPLANATIONS)),
    (12, filled(*ADVICE)),
    (8, filled(*ROLES)),
    (16, filled(*SUMS)),
    (10, filled(*CODE)),
    (4, about_a_country),
    (10, about_a_text),
)


# Draws in a row that give nothing new, after which the lists count as used up.
MOST_REPEATED = 2000


def prompts(count: int, seed: int) -> Iterator[str]:
    """Yields `count` different prompts.

    Raises:
        ValueError: the lists do not give so many.
    """
    rng = random.Random(seed)
    shares, kinds = zip(*KINDS, strict=True)
    seen: set[str] = set()
    repeated = 0
    while len(seen) < count:
        (kind,) = rng.choices(kinds, shares)
        text = kind(rng)
        if text in seen:
            repeated += 1
            if repeated == MOST_REPEATED:
                raise ValueError(f"--count {count} is more than the lists give ({len(seen)}); set it lower.")
            continue
        repeated = 0
        seen.add(text)
        yield text


def main(argv: list[str] | None = None) -> int:
    parser = cli.build_parser(__doc__)
    parser.add_argument("--count", type=cli.count, default=4000, help="how many prompts (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="another seed, other prompts (default: %(default)s)")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    args = parser.parse_args(argv)
    for index, text in enumerate(prompts(args.count, args.seed)):
        line = {"id": f"made-{args.seed}-{index}", "messages": [{"role": "user", "content": text}]}
        sys.stdout.write(json.dumps(line, ensure_ascii=False) + "\n")
    return 0


if __name__ == "__main__":
    cli.run(main)
