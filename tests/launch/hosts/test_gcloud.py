"""Command lines of gcloud: what is printed of one that failed."""

from launch.hosts import gcloud


def test_a_failed_command_is_printed_without_its_secret(capfd):
    step = gcloud.Step("start", ("false", "env NAME=abc123", "more"), "abc123")
    assert gcloud.perform([step], dry_run=False) == 1
    assert "failed (exit code 1): false 'env NAME=SECRET' more" in capfd.readouterr().out
    assert gcloud.perform([step._replace(secret="")], dry_run=False) == 1
    assert "false 'env NAME=abc123' more" in capfd.readouterr().out
