"""The tools that tinychat is offered: their OpenAI definitions, requests that need them, and their results."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from . import words

Arguments = dict[str, Any]
CALL_TAGS = ("<tool_call>", "</tool_call>")


@dataclass(frozen=True)
class Tool:
    """One kind of tool.

    ``names`` are the function names it may go by, so that the name has to be read from the offer.
    ``fields`` maps each parameter to its JSON type, ``sample`` draws arguments, ``requests`` are what a
    user says (formatted with the arguments), and ``result`` draws what the tool returns; ``answer``, a
    template over arguments and result, is what the assistant then says.
    """

    names: tuple[str, ...]
    description: str
    fields: dict[str, str]
    sample: Callable[[random.Random], Arguments]
    requests: tuple[str, ...]
    result: Callable[[random.Random], Arguments]
    answer: str


@dataclass(frozen=True)
class Offer:
    """A tool as one request offers it: its name, its parameters' names, its entry in ``tools``."""

    tool: Tool
    name: str
    keys: dict[str, str]
    definition: dict[str, Any]

    def renamed(self, arguments: Arguments) -> Arguments:
        """The arguments under the names that the offer gives them."""
        return {self.keys[field]: value for field, value in arguments.items()}


_FIELD_NAMES = {
    "city": ("city", "location", "place", "town"), "time": ("time", "at", "hour"), "to": ("to", "recipient", "person"),
    "text": ("text", "message", "body"), "title": ("title", "song", "name"), "symbol": ("symbol", "ticker", "stock"),
    "amount": ("amount", "value"), "source": ("source", "from_currency"), "target": ("target", "to_currency"),
    "place": ("place", "restaurant", "name"), "people": ("people", "guests", "seats"), "room": ("room", "where"),
    "state": ("state", "switch", "value"), "item": ("item", "product", "name"),
    "number": ("number", "code", "tracking_id"),
}
"""What a parameter may be called in an offer, so that its name too has to be read there."""

_OPTIONAL: tuple[tuple[str, dict[str, Any]], ...] = (
    ("unit", {"type": "string", "enum": ["celsius", "fahrenheit"]}), ("verbose", {"type": "boolean"}),
    ("limit", {"type": "integer"}), ("language", {"type": "string"}))


def offer(rng: random.Random, tool: Tool) -> Offer:
    """Offer a tool the way clients write it: own names, now and then descriptions and optional parameters."""
    name = rng.choice(tool.names)
    keys = {field: rng.choice(_FIELD_NAMES.get(field, (field,))) for field in tool.fields}
    properties: dict[str, Any] = {keys[field]: {"type": kind} for field, kind in tool.fields.items()}
    if rng.random() < 0.3:
        for field, key in keys.items():
            properties[key]["description"] = f"The {field}."
    if rng.random() < 0.2:
        extra, schema = rng.choice(_OPTIONAL)
        properties.setdefault(extra, dict(schema))
    parameters: dict[str, Any] = {"type": "object", "properties": properties, "required": list(keys.values())}
    if rng.random() < 0.1:
        parameters["additionalProperties"] = False
    function = {"name": name, "description": tool.description, "parameters": parameters}
    if rng.random() < 0.15:
        del function["description"]
    return Offer(tool, name, keys, {"type": "function", "function": function})


def call_text(name: str, arguments: Arguments) -> str:
    """The assistant text that calls a tool, in the Hermes/Qwen format."""
    call = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    opening, closing = CALL_TAGS
    return f"{opening}\n{call}\n{closing}"


def clock(rng: random.Random) -> str:
    return f"{rng.randrange(24):02d}:{rng.randrange(0, 60, 5):02d}"


def message(rng: random.Random) -> str:
    subject, state = rng.choice(words.NOUNS), rng.choice(words.ADJECTIVES)
    return rng.choice((f"the {subject} is {state}", f"we need a {state} {subject}", f"my {subject} is {state} again"))


def title(rng: random.Random) -> str:
    return " ".join(rng.choice(words.WORDS).capitalize() for _ in range(rng.randint(1, 3)))


def ticker(rng: random.Random) -> str:
    return "".join(rng.choice("ABCDEFGHIJKLMNOPQRSTUVWXYZ") for _ in range(rng.randint(3, 4)))


def _done(rng: random.Random) -> Arguments:
    return {"status": "ok"}


TOOLS = (
    Tool(("get_weather", "weather_now", "current_weather"), "Get the current weather in a city.", {"city": "string"},
         lambda rng: {"city": rng.choice(words.CITIES)},
         ("What is the weather in {city}?", "How is the weather in {city} today?", "Is it raining in {city} right now?",
          "Tell me the weather in {city}."),
         lambda rng: {"degrees": rng.randint(1, 39), "sky": rng.choice(("sunny", "cloudy", "rainy", "windy", "foggy"))},
         "It is {degrees} degrees and {sky} in {city}."),
    Tool(("get_time", "local_time", "clock"), "Get the local time in a city.", {"city": "string"},
         lambda rng: {"city": rng.choice(words.CITIES)},
         ("What time is it in {city}?", "Tell me the time in {city}.", "How late is it in {city} now?"),
         lambda rng: {"time": clock(rng)}, "It is {time} in {city}."),
    Tool(("set_alarm", "add_alarm", "wake_me"), "Set an alarm.", {"time": "string"},
         lambda rng: {"time": clock(rng)},
         ("Wake me at {time}.", "Set an alarm for {time}.", "I have to get up at {time}. Please set an alarm."),
         _done, "Done."),
    Tool(("send_message", "send_text", "notify"), "Send a message to a person.", {"to": "string", "text": "string"},
         lambda rng: {"to": rng.choice(words.NAMES), "text": message(rng)},
         ("Tell {to} that {text}.", "Send a message to {to}: {text}", "Please let {to} know that {text}."),
         _done, "Done."),
    Tool(("play_song", "play_music", "start_song"), "Play a song.", {"title": "string"},
         lambda rng: {"title": title(rng)},
         ("Play the song {title}.", "I want to hear {title}.", "Put on {title}, please."),
         _done, "Done."),
    Tool(("get_stock_price", "stock_quote", "share_price"), "Get the price of a share.", {"symbol": "string"},
         lambda rng: {"symbol": ticker(rng)},
         ("What is the price of {symbol}?", "How much is a share of {symbol}?", "Look up the stock {symbol}."),
         lambda rng: {"price": rng.randint(2, 999)}, "One share of {symbol} costs {price}."),
    Tool(("convert_money", "exchange", "convert_currency"), "Convert an amount of money.",
         {"amount": "integer", "source": "string", "target": "string"},
         lambda rng: dict(zip(("amount", "source", "target"), (
             rng.randint(2, 999), *rng.sample(("EUR", "USD", "GBP", "JPY", "CHF", "INR", "BRL", "SEK"), 2)))),
         ("How much is {amount} {source} in {target}?", "Convert {amount} {source} to {target}."),
         lambda rng: {"result": rng.randint(2, 9999)}, "That is {result} {target}."),
    Tool(("book_table", "reserve_table", "table_booking"), "Book a table.", {"place": "string", "people": "integer"},
         lambda rng: {"place": title(rng), "people": rng.randint(2, 12)},
         ("Book a table for {people} at {place}.", "Reserve a table at {place} for {people} people."),
         _done, "Done."),
    Tool(("switch_light", "set_light", "light_control"), "Switch a light on or off.",
         {"room": "string", "state": "string"},
         lambda rng: {"room": rng.choice(words.ROOMS), "state": rng.choice(("on", "off"))},
         ("Switch the light in the {room} {state}.", "Turn {state} the light in the {room}.",
          "Please turn the {room} light {state}."),
         _done, "Done."),
    Tool(("add_to_list", "shopping_add", "list_add"), "Put an item on the shopping list.", {"item": "string"},
         lambda rng: {"item": rng.choice(words.FOODS + words.NOUNS)},
         ("Put {item} on my shopping list.", "We need {item}. Add it to the list.", "Add {item} to the shopping list."),
         _done, "Done."),
    Tool(("track_parcel", "parcel_status", "find_parcel"), "Find out where a parcel is.", {"number": "string"},
         lambda rng: {"number": words.code(rng)},
         ("Where is my parcel {number}?", "Track the parcel {number}.", "Has the parcel {number} arrived?"),
         lambda rng: {"place": rng.choice(words.CITIES)}, "Parcel {number} is in {place}."),
)


_ACTIONS = ("open", "find", "make", "get", "check", "start", "stop", "update", "delete", "list", "create", "move")
_NAME_SHAPES = ("{}_{}", "{}_the_{}", "{}_my_{}")


def made_up_tool(rng: random.Random) -> Tool:
    """A tool that nobody knows beforehand: name and parameters are random words, and the request spells them out."""
    action, thing = rng.choice(_ACTIONS), rng.choice(words.NOUNS)
    name = rng.choice(_NAME_SHAPES).format(action, thing)
    fields = {field: rng.choice(("string", "integer")) for field in rng.sample(words.NOUNS, rng.randint(1, 2))}

    def sample(rng: random.Random) -> Arguments:
        texts = (words.unlisted_word, words.code, title)
        return {field: rng.randrange(1000) if kind == "integer" else rng.choice(texts)(rng)
                for field, kind in fields.items()}

    pairs = " and ".join(f"{field} {{{field}}}" for field in fields)
    requests = (f"Call {name} with {pairs}.", f"Use {name} with {pairs}.",
                f"{action.capitalize()} the {thing} with {pairs}.")
    return Tool((name,), f"{action.capitalize()} the {thing}.", fields, sample, requests, _done, "Done.")
