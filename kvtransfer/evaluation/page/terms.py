"""Every term of the page, in a line or two."""

from kvtransfer.evaluation.page.markup import Safe, el, join

TERMS = (
    (
        "prefix",
        "The text that stands hidden before what is scored or asked: a document's first "
        "part, or a guide.",
    ),
    (
        "cache",
        "The keys and values that a model keeps of a text it has read, so as not to read it again.",
    ),
    (
        "source, target",
        "The model that has read the prefix, and the model that is to go on from "
        "there without reading it.",
    ),
    (
        "mapped",
        "The target on the source's cache, taken over by the mapping: what is being tested.",
    ),
    ("floor (none)", "The target without any prefix. What does no better has brought nothing."),
    ("ceiling (own)", "The target on its own cache of the prefix, as if it had read it itself."),
    ("source (alone)", "The source goes on by itself: what you have if you do not switch."),
    (
        "controls",
        "Prefixes that should not work: the source's cache unmapped (raw), zeros "
        "(zeroed), mapped without positions (unrotated), and mapped by a fit on permuted tokens "
        "(shuffled). A mapping that does not beat them proves nothing.",
    ),
    (
        "NLL",
        "Negative log-likelihood: how surprised the reader is by the true next tokens, in nats "
        "a token. Lower is better; perplexity is e to its power.",
    ),
    (
        "gap recovered",
        "The share of the distance from floor to ceiling that is won back: 0 % is no "
        "prefix, 100 % its own. It can fall below or rise above.",
    ),
    (
        "retention",
        "The ceiling's perplexity over this one's, or the share of its right answers. It "
        "flatters: a reader that ignores its prefix retains much.",
    ),
    (
        "KL to own",
        "How far the predicted next-token probabilities are from those on its own "
        "prefix, in nats. 0 is no difference.",
    ),
    ("top-1", "How often the likeliest next token is the one that its own prefix makes likeliest."),
    ("accuracy", "The share of questions about a hidden guide that are answered right."),
    (
        "attention cosine",
        "How alike what a layer's attention returns is to what it returns on the "
        "target's own prefix: 1 is the same direction, 0 unrelated.",
    ),
    (
        "R²",
        "The share of the variance of a layer's keys and values that a linear map explains on "
        "tokens it was not fitted on. A high one does not promise the same behaviour.",
    ),
    (
        "95 % interval",
        "Paired bootstrap over the items: all conditions of an item are drawn "
        "together. n is the number of items. It knows nothing of other texts than these.",
    ),
)


def terms() -> Safe:
    """A list of definitions."""
    pairs = [join([el("dt", None, word), el("dd", None, meaning)]) for word, meaning in TERMS]
    return el("dl", {"class": "terms"}, *pairs)
