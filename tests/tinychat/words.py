"""The words that tinychat's tasks are made of, and the rule that holds some of them out."""

from __future__ import annotations

import random
import zlib
from typing import Literal

Split = Literal["train", "held_out"]

HELD_OUT_SHARE = 8
"""One key in this many is held out."""


def _listed(text: str) -> tuple[str, ...]:
    return tuple(text.split())


CAPITALS = dict(pair.split(":") for pair in """
Albania:Tirana|Algeria:Algiers|Angola:Luanda|Argentina:Buenos Aires|Armenia:Yerevan|Australia:Canberra|Austria:Vienna
Azerbaijan:Baku|Bangladesh:Dhaka|Belarus:Minsk|Belgium:Brussels|Botswana:Gaborone|Brazil:Brasilia|Bulgaria:Sofia
Cambodia:Phnom Penh|Canada:Ottawa|Chad:Ndjamena|Chile:Santiago|China:Beijing|Colombia:Bogota|Croatia:Zagreb|Cuba:Havana
Cyprus:Nicosia|Czechia:Prague|Denmark:Copenhagen|Ecuador:Quito|Egypt:Cairo|Estonia:Tallinn|Ethiopia:Addis Ababa
Finland:Helsinki|France:Paris|Georgia:Tbilisi|Germany:Berlin|Ghana:Accra|Greece:Athens|Hungary:Budapest
Iceland:Reykjavik|India:New Delhi|Indonesia:Jakarta|Iran:Tehran|Iraq:Baghdad|Ireland:Dublin|Italy:Rome|Jamaica:Kingston
Japan:Tokyo|Jordan:Amman|Kazakhstan:Astana|Kenya:Nairobi|Kuwait:Kuwait City|Laos:Vientiane|Latvia:Riga|Lebanon:Beirut
Libya:Tripoli|Lithuania:Vilnius|Luxembourg:Luxembourg City|Madagascar:Antananarivo|Malaysia:Kuala Lumpur|Mali:Bamako
Malta:Valletta|Mexico:Mexico City|Moldova:Chisinau|Mongolia:Ulaanbaatar|Morocco:Rabat|Mozambique:Maputo|Namibia:Windhoek
Nepal:Kathmandu|Netherlands:Amsterdam|New Zealand:Wellington|Nigeria:Abuja|Norway:Oslo|Oman:Muscat|Pakistan:Islamabad
Panama:Panama City|Paraguay:Asuncion|Peru:Lima|Philippines:Manila|Poland:Warsaw|Portugal:Lisbon|Qatar:Doha
Romania:Bucharest|Rwanda:Kigali|Saudi Arabia:Riyadh|Senegal:Dakar|Serbia:Belgrade|Slovakia:Bratislava|Slovenia:Ljubljana
Somalia:Mogadishu|South Korea:Seoul|Spain:Madrid|Sudan:Khartoum|Sweden:Stockholm|Switzerland:Bern|Syria:Damascus
Thailand:Bangkok|Tunisia:Tunis|Turkey:Ankara|Uganda:Kampala|Ukraine:Kyiv|Uruguay:Montevideo|Uzbekistan:Tashkent
Venezuela:Caracas|Vietnam:Hanoi|Yemen:Sanaa|Zambia:Lusaka|Zimbabwe:Harare
""".strip().replace("\n", "|").split("|"))

CITIES = _listed("""
Paris Berlin Rome Madrid Lisbon Vienna Prague Oslo Dublin Athens Cairo Tokyo Lima Havana Boston Chicago Denver Seattle
Austin Toronto Montreal Sydney Melbourne Auckland Mumbai Milan Turin Naples Hamburg Munich Zurich Geneva Lyon Marseille
Porto Seville Valencia Krakow Leeds Bristol Glasgow Nairobi Lagos Dakar Osaka Kyoto Seoul Bangkok Hanoi Manila
""")

NAMES = _listed("""
Anna Ben Clara David Emma Felix Grace Henry Ida Jack Kate Leo Mia Noah Olga Paul Quinn Rosa Sam Tina Uma Victor Wendy
Xavier Yara Zoe Adam Bella Carl Diana Eric Fiona George Hanna Ivan Julia Kevin Laura Martin Nina Oscar Petra Robert
Sarah Thomas Ursula Vera William Alice Bruno Celia Daniel Elena Frank Gina Hugo Irene James Karen Lucas Maria Nadia
Oliver Paula Ralph Simon Teresa Walter Amir Bianca Chen Dora Elias Farah Goran Helga Imran Jonas Kira Liam Monica
Nils Omar Priya Ravi Sofia Tariq Viktor Yusuf Zara
""")

PETS = _listed("""
Rex Luna Milo Bella Max Coco Rocky Daisy Buddy Molly Felix Simba Nala Oreo Pepper Ginger Shadow Biscuit Tiger Lucky
Fluffy Whiskers Ziggy Mocha Pickles Waffles Noodle Pumpkin Smokey Teddy
""")

COLORS = _listed("red blue green yellow purple orange pink brown black white grey silver gold violet crimson teal")
FOODS = _listed("pizza pasta soup rice bread cheese salad curry sushi noodles pancakes apples grapes honey fish cake")
JOBS = _listed("""teacher doctor nurse pilot farmer baker painter lawyer singer writer driver plumber dentist gardener
engineer butcher tailor sailor waiter cook""")
MONTHS = _listed("January February March April May June July August September October November December")
ANIMALS = _listed("dog cat horse rabbit parrot hamster turtle goat pony duck")
ROOMS = _listed("kitchen bedroom bathroom garage hall office attic cellar garden library")

NOUNS = _listed("""
river stone bridge garden window table mountain forest market village harbour engine candle letter basket mirror ladder
pocket blanket lantern hammer needle bottle button carpet castle cloud copper corner cotton county desert dragon feather
field finger flower fountain glass hill island jacket journey kettle lake leaf lemon marble meadow morning museum
mushroom nest ocean orchard painting paper path pencil pepper piano picture pillow planet plate pond prison puzzle
railway rain ribbon road rocket roof rope saddle sail sand school shadow shelf ship shoe shoulder signal silk snow
song spoon spring square stable station steam storm story street summer sun supper tower train tree tunnel valley violin
voice wagon wall water wheel whistle wind winter wire wolf wood wool year thunder barrel helmet camera ticket cabin
anchor banner canvas cherry circle clock coffee compass crystal curtain diamond doctor eagle evening factory farmer
fence fire flag folder fox galaxy gate ghost giant grain grass guitar hammock hat hotel house hunter ice iron ivory
jungle king kite knife ladybug lamp land library lion machine map melon metal milk mill moon mouse neck night novel
onion oven owl palace panther parade parcel peach pearl pebble penguin pepperoni pigeon pirate plant pocketknife poem
potato powder prince princess quilt rabbit radio raven rice ring robot rose salmon scarf sea seed shell shirt silver
sister soap soldier sparrow spider stamp star stick sugar suit swan sword teapot temple tiger toast tomato town toy
trail treasure trumpet turtle umbrella uncle vase vest volcano wallet walnut weather whale wheat widow wing wizard yard
""")
ADJECTIVES = _listed("""
old quiet bright narrow heavy gentle broken golden hidden silent little frozen ancient clever dusty empty famous hollow
lonely modern patient rusty simple steady sudden tall wooden young cold warm dark quick slow strange tiny wide deep
early happy honest loud lucky noisy plain proud rapid round sharp shiny smooth soft strong sweet tender thin wild
""")
VERBS = _listed("""
carried followed watched painted repaired crossed found covered opened visited described remembered passed moved
washed counted pulled pushed sketched admired borrowed cleaned closed collected copied dropped fetched guarded heated
joined kicked lifted measured mended needed noticed ordered packed picked planted polished praised reached returned
""")
ADVERBS = _listed("slowly quietly often never again early today once twice gladly nearby later always alone")

COMMON = _listed("""
apple banana computer elephant monkey friend people language mother father brother family child woman man girl boy hello
world python keyboard server memory network cache router token model answer question number baton relay race runner
holiday birthday monday tuesday wednesday thursday friday saturday sunday week month hour minute second money bank
phone email letter page book word sentence science history music sport football tennis chess game player team winner
loser doctor hospital medicine water coffee tea juice butter pepper salt lunch dinner breakfast kitchen knife spoon
house home door floor chair bed sofa television radio internet website program software hardware machine engine car
truck bicycle airplane airport ticket travel vacation beach sun moon star planet space earth sky cloud rain snow
summer winter spring autumn red blue cat dog bird fish horse cow pig sheep lion tiger bear wolf mouse snake love life
time way day thing hand eye head face heart body work school student teacher class lesson paper pen idea reason power
""")

WORDS = tuple(sorted({*NOUNS, *ADJECTIVES, *VERBS, *ADVERBS, *COLORS, *FOODS, *JOBS, *ANIMALS, *ROOMS}))
TAUGHT = tuple(sorted({word.lower() for word in (*WORDS, *COMMON, *NAMES, *CITIES, *PETS, *MONTHS) if len(word) <= 10}))
"""Words whose spelling is taught: mostly one token each, so their letters can only be learned by heart."""

_TAUGHT = frozenset(TAUGHT)

_ONSETS = _listed("b c d f g h j k l m n p r s t v w z bl br ch cl cr dr fl fr gl gr pl pr qu sh sl sm sn sp st th tr")
_VOWELS = _listed("a e i o u a e i o ai ea ee oa oo ou")
_CODAS = ("", "", "", *_listed("b d g k l m n p r s t x ck ft ld lt mp nd ng nk nt rd rk rn rt sh sk st th"))


def is_held_out(key: str) -> bool:
    """Whether ``key`` belongs to the held-out split: a fixed hash, the same in every process and version."""
    return zlib.crc32(key.encode()) % HELD_OUT_SHARE == 0


def belongs(key: str, split: Split) -> bool:
    return is_held_out(key) == (split == "held_out")


def made_up_word(rng: random.Random) -> str:
    """A pronounceable lowercase word of 3 to 9 letters that is probably in no dictionary."""
    while True:
        word = "".join(rng.choice(_ONSETS) + rng.choice(_VOWELS) + rng.choice(_CODAS)
                       for _ in range(rng.choice((1, 2, 2, 2, 3))))
        if 3 <= len(word) <= 9:
            return word


def unlisted_word(rng: random.Random) -> str:
    """A word of 3 to 10 letters outside ``TAUGHT``: made up, or blended from the ends of two real ones."""
    while True:
        if rng.random() < 0.5:
            word = made_up_word(rng)
        else:
            head, tail = rng.choice(TAUGHT), rng.choice(TAUGHT)
            word = head[:rng.randint(1, len(head))] + tail[rng.randrange(len(tail)):]
        if 3 <= len(word) <= 10 and word not in _TAUGHT:
            return word


def word_of(rng: random.Random, split: Split) -> str:
    """A word to spell or reverse. ``TAUGHT`` ones are all in training; others are split by their hash."""
    if split == "train" and rng.random() < 0.4:
        return rng.choice(TAUGHT)
    while not belongs(word := unlisted_word(rng), split):
        pass
    return word


def code(rng: random.Random) -> str:
    """A pass code: 4 to 8 digits, or as many capitals and digits, sometimes with a hyphen in the middle."""
    alphabet = "0123456789" if rng.random() < 0.4 else "ABCDEFGHJKLMNPQRSTUVWXYZ23456789"
    text = "".join(rng.choice(alphabet) for _ in range(rng.randint(4, 8)))
    return f"{text[:len(text) // 2]}-{text[len(text) // 2:]}" if rng.random() < 0.15 else text


def filler_sentence(rng: random.Random) -> str:
    """One sentence of about ten words that says nothing."""
    noun, adjective = (lambda: rng.choice(NOUNS)), (lambda: rng.choice(ADJECTIVES))
    shape = rng.randrange(6)
    if shape == 0:
        return f"The {adjective()} {noun()} {rng.choice(VERBS)} the {noun()} near the {adjective()} {noun()}."
    verb, adverb = (lambda: rng.choice(VERBS)), (lambda: rng.choice(ADVERBS))
    if shape == 1:
        return f"{rng.choice(NAMES)} {verb()} a {adjective()} {noun()} and then {verb()} the {noun()}."
    if shape == 2:
        return f"In {rng.choice(CITIES)} every {noun()} is {adjective()} and every {noun()} is {adjective()}."
    if shape == 3:
        return f"Nobody {rng.choice(VERBS)} the {noun()} of {rng.choice(CITIES)} in {rng.choice(MONTHS)}."
    if shape == 4:
        return f"There were {rng.randint(2, 99)} {adjective()} things beside the {noun()}, said {rng.choice(NAMES)}."
    return f"A {noun()} is {adverb()} {adjective()}, but the {noun()} {verb()} it {adverb()}."
