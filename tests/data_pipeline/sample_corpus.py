SEQUENCE_LENGTH = 16


def corpus_documents():
    """Some 90 documents of two sources, no two alike, with text of several scripts."""
    words = (
        "the model reads tokens épée Straße 日本語 def return self.x \n\t <|endoftext|> 🙂".split(
            " "
        )
    )
    for number in range(90):
        length = 5 + number * 7 % 60
        text = " ".join(words[(number * 3 + k * k) % len(words)] for k in range(length))
        yield f"{number}: {text}", "Github" if number % 3 else "Pile-CC"
