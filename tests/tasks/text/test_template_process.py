"""Chat templates of strangers end within their limits, and the ones after them are rendered."""

import datetime
import threading
import time

import pytest

from tasks.text import template_process
from tasks.text.chat_templates import Limit
from tasks.text.template_process import TemplateError, TemplateProcess

DAY = datetime.date(2024, 2, 29)
ASK = [{"role": "user", "content": "Hi \ud800 é"}]
LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% set c = a * b %}{% endfor %}{% endfor %}"
EXCESSES = {
    "loops": (LOOPS, Limit.TIME),
    "a number of any length": ("{% set n = 9 %}{{ n ** (n ** n) }}", Limit.TIME),
    "a text of any length": ("{{ 'a' * 9999999999 }}", Limit.MEMORY),
    "a wide column": ("{{ 'a'.center(9999999999) }}", Limit.MEMORY),
    "a macro that calls itself": ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", Limit.DEPTH),
}


# "a number of any length" exceeds the same limit as "loops", in C code, which is harder to end
@pytest.mark.parametrize(
    ("excess", "limit"),
    [pytest.param(*case, marks=[pytest.mark.slow] * (name == "loops"), id=name) for name, case in EXCESSES.items()],
)
def test_a_template_without_measure_is_an_error_and_the_next_conversation_is_rendered(monkeypatch, excess, limit):
    monkeypatch.setattr(template_process, "CPU_SECONDS", 1)
    template = TemplateProcess("{% if messages[0].role == 'bad' %}" + excess + "{% endif %}{{ bos_token }}")
    began = time.process_time()
    with pytest.raises(TemplateError) as caught:
        template.render([{"role": "bad"}], now=DAY, bos_token="<s>")
    assert caught.value.limit is limit
    assert time.process_time() - began < 0.5  # of this process
    assert template.render(ASK, now=DAY, bos_token="<s>") == "<s>"


def test_every_thread_gets_its_own_answer():
    template = TemplateProcess("{{ messages[0].content }}{{ strftime_now('%d %b') }}")
    found = {}

    def ask(number):
        found[number] = [template.render([{"content": f"{number}-"}], now=DAY) for _ in range(50)]

    threads = [threading.Thread(target=ask, args=[number]) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {number: [f"{number}-29 Feb"] * 50 for number in range(4)}
    assert template.render(ASK, now=DAY).startswith("Hi \ud800 é")


@pytest.mark.parametrize("source", ["{% if %}", "{{ messages + 1 }}"])
def test_a_mistake_of_a_template_exceeds_no_limit(source):
    with pytest.raises(TemplateError) as caught:
        TemplateProcess(source).render(ASK, now=DAY)
    assert caught.value.limit is None


def test_what_is_not_json_is_an_error_and_its_process_ends_with_it():
    template = TemplateProcess("{{ messages }}")
    process = template._process
    with pytest.raises(TemplateError, match="not JSON"):
        template.render([{"content": b"bytes"}], now=DAY)
    del template
    assert process.poll() == 0
