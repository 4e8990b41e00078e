"""The explorers in a real browser: python ci/browser.py [notebooks]   (bash ci/browser.sh sets up first)

Each explorer is opened in JupyterLab, all cells are run, every slider, list and button of its panel is moved once, and
a picture is taken. It fails on an error output, an error of the browser's console, a panel that does not answer, and
a text that is cut or leaves its box. Pictures: build/browser/.
"""

import argparse
import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from playwright.sync_api import sync_playwright

ROOT = Path(__file__).resolve().parents[1]
PICTURES = ROOT / "build" / "browser"
MINUTES = 20  # for a notebook on a busy machine: to end a hang
CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
RUN_STATE = """() => {
  const cells = window.jupyterapp.shell.currentWidget.content.widgets.filter(c => c.model.type === 'code');
  const state = c => c.model.executionState;
  const starred = c => c.promptNode?.textContent.includes('*');
  const waiting = cells.filter(c => state(c) && state(c) !== 'idle' || starred(c));
  const fresh = cells.filter(c => c.model.sharedModel.source.trim() && !c.model.executionCount);
  return [cells.length, waiting.length, fresh.length];
}"""
ERRORS = """() => {
  const found = [];
  for (const cell of window.jupyterapp.shell.currentWidget.content.widgets)
    if (cell.model.type === 'code')
      for (const out of cell.model.outputs.toJSON())
        if (out.output_type === 'error') found.push(out.ename + ': ' + out.evalue);
  return found;
}"""
# What is wider or higher than its box, of the words of a panel; and what stands to the right of the window.
CUT = """panel => {
  const found = [];
  for (const e of panel.querySelectorAll('.widget-label, .jupyter-button, .widget-html-content, option, img')) {
    const box = e.getBoundingClientRect();
    if (!box.width) continue;
    const low = e.scrollHeight > e.clientHeight + 4 && !e.matches('option, .jupyter-button');
    const words = (e.textContent || 'a picture').slice(0, 60);
    if (e.scrollWidth > e.clientWidth + 1 || low) found.push('cut: ' + words);
    if (box.right > window.innerWidth + 1) found.push('beyond the window: ' + words);
  }
  return found;
}"""


def server(folder, port):
    "JupyterLab on this machine, over a copy of the notebooks."
    command = [sys.executable, "-m", "jupyter", "lab", "--no-browser", "--allow-root", f"--port={port}"]
    command += ["--ServerApp.port_retries=0", "--IdentityProvider.token=", "--ServerApp.password="]
    command += ["--LabApp.expose_app_in_browser=True", "--LabApp.extension_manager=readonly"]
    command += ["--ServerApp.disable_check_xsrf=True", f"--ServerApp.root_dir={folder}"]
    asked = folder / ".lab" / "@jupyterlab" / "apputils-extension" / "notification.jupyterlab-settings"
    asked.parent.mkdir(parents=True)  # else a question about news lies over the panel
    asked.write_text('{"fetchNews": "false", "checkForUpdates": false}', encoding="utf-8")
    log = open(folder / "server.log", "w")
    env = os.environ | dict(
        JUPYTERLAB_SETTINGS_DIR=str(folder / ".lab"), JUPYTERLAB_WORKSPACES_DIR=str(folder / ".work")
    )
    return subprocess.Popen(command, cwd=folder, stdout=log, stderr=log, env=env)


def listening(lab, port, log, minutes=5):
    "Until the server answers; an error with its last words if it has ended."
    end = time.monotonic() + 60 * minutes
    while time.monotonic() < end and lab.poll() is None:
        with contextlib.suppress(OSError):
            return socket.create_connection(("127.0.0.1", port), timeout=1).close()
        time.sleep(0.2)
    raise RuntimeError(f"JupyterLab does not answer on port {port}: {log.read_text()[-600:]}")


def wait(page, what, done, minutes=MINUTES):
    "Until `done()` is true; an error that says what was waited for."
    end = time.monotonic() + 60 * minutes
    while not done():
        if time.monotonic() > end:
            raise TimeoutError(f"{what}: not within {minutes} minutes")
        page.wait_for_timeout(500)


def quiet(page):
    "Whether the kernel has nothing to do."
    state = "() => window.jupyterapp.shell.currentWidget.sessionContext.session?.kernel?.status"
    return page.evaluate(state) == "idle"


def moved(page, panel):
    "Every control of a panel, once; yields its name and whether anything of the panel has changed."
    looks = "p => [...p.querySelectorAll('img')].map(i => i.src).join() + p.innerText"
    for kind in (".widget-slider", ".widget-dropdown select", ".widget-text input", ".jupyter-button:not([disabled])"):
        for k in range(panel.locator(kind).count()):
            control, before = panel.locator(kind).nth(k), panel.evaluate(looks)
            if not control.is_visible():
                continue
            if kind == ".widget-slider":
                control.locator(".noUi-handle").first.press("ArrowRight")
            elif "select" in kind:
                options = control.locator("option").count()
                control.select_option(index=(control.evaluate("e => e.selectedIndex") + 1) % options)
            elif "input" in kind:
                control.press("ArrowUp")
            else:
                control.click()
            page.wait_for_timeout(300)
            wait(page, f"the kernel after {kind} {k}", lambda: quiet(page), 5)
            page.wait_for_timeout(300)
            name = control.evaluate("e => (e.closest('.jupyter-widgets')?.innerText || e.innerText).split('\\n')[0]")
            yield name, panel.evaluate(looks) != before


def explore(page, port, path, folder):
    "What is wrong with an explorer: sentences; none if all is well."
    wrong, name = [], path.parent.name
    page.on("console", lambda m: wrong.append(f"console: {m.text[:200]}") if m.type == "error" else None)
    page.on("pageerror", lambda e: wrong.append(f"page: {str(e)[:200]}"))
    page.goto(f"http://127.0.0.1:{port}/lab/tree/{path.relative_to(folder).as_posix()}")
    page.wait_for_function(
        "() => window.jupyterapp?.shell?.currentWidget?.content?.widgets?.length > 3", timeout=120_000
    )
    wait(page, "a kernel", lambda: quiet(page), 5)
    wrong.clear()  # what JupyterLab itself says while it starts is not ours
    page.evaluate("() => { window.jupyterapp.commands.execute('notebook:run-all-cells') }")
    page.wait_for_timeout(2000)
    wait(page, "all cells", lambda: page.evaluate(RUN_STATE)[1:] == [0, 0] and quiet(page) or page.evaluate(ERRORS))
    wrong += [f"error output: {e[:300]}" for e in page.evaluate(ERRORS)]
    panels = page.locator(".jp-OutputArea-output .widget-vbox:has(img)")
    wait(page, "a panel", lambda: panels.count() > 0, 1)
    panel = panels.first
    panel.scroll_into_view_if_needed()
    panel.screenshot(path=PICTURES / f"{name}.png")
    wrong += [f"at the start, {said}" for said in panel.evaluate(CUT)]
    answers = list(moved(page, panel))
    print(
        f"{name}: "
        + ", ".join(f"{control} {'moves it' if changed else 'changes nothing'}" for control, changed in answers)
    )
    if not any(changed for _, changed in answers):
        wrong.append("no control changes the panel")
    panel.screenshot(path=PICTURES / f"{name}_moved.png")
    wrong += [f"after moving, {said}" for said in panel.evaluate(CUT)]
    wrong += [f"error output: {e[:300]}" for e in page.evaluate(ERRORS)]
    page.evaluate("() => window.jupyterapp.shell.currentWidget.sessionContext.shutdown()")
    return list(dict.fromkeys(wrong))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("notebooks", nargs="*", type=Path, help="default: the explorers")
    parser.add_argument("--port", type=int, default=8897)
    parser.add_argument("--width", type=int, default=1440)
    given = parser.parse_args()
    paths = given.notebooks or sorted(ROOT.glob("nbs/5*_*/*_explorer.ipynb"))
    browser = next((found for name in CHROMIUM if (found := shutil.which(name))), None)
    PICTURES.mkdir(parents=True, exist_ok=True)
    failed = 0
    with tempfile.TemporaryDirectory() as home, sync_playwright() as playwright:
        folder = Path(home)
        shutil.copytree(ROOT / "nbs", folder / "nbs", ignore=shutil.ignore_patterns(".ipynb_checkpoints", "results"))
        lab = server(folder, given.port)
        how = dict(executable_path=browser) if browser else {}  # else the one that playwright has installed
        chromium = playwright.chromium.launch(args=["--no-sandbox"], **how)
        try:
            listening(lab, given.port, folder / "server.log")
            for path in paths:
                page = chromium.new_page(viewport=dict(width=given.width, height=1000))
                begin = time.monotonic()
                wrong = explore(page, given.port, folder / path.resolve().relative_to(ROOT), folder)
                page.close()
                print(f"{'FAILED' if wrong else 'ok':8}{time.monotonic() - begin:5.0f} s  {path}", flush=True)
                for sentence in wrong:
                    print("        " + sentence, flush=True)
                failed += bool(wrong)
        finally:
            chromium.close()
            lab.terminate()
            lab.wait()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
