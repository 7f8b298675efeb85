"""A small stateful API of our own, for the tests of the bfcl environment and of the calls it runs."""

SHARED = {"colour": "red"}


class Lamp:
    def __init__(self):
        self.on, self.paint, self.log = False, SHARED, []

    def _load_scenario(self, scenario, long_context=False):
        self.on = scenario.get("on", False)

    def switch(self, on: bool):
        if on == self.on:
            return {"error": "switch: it is so already"}
        self.on = on
        return {"on": self.on}

    def colour(self, name: str = "red"):
        self.paint["colour"] = name
        return None

    def look(self):
        return {"on": self.on, "colour": self.paint["colour"]}

    def write(self, text: str):
        self.log.append(text)
        return text

    def power(self, base: float, exponent: float):
        return {"result": base**exponent}

    def _secret(self):
        raise AssertionError("a private method was called")
