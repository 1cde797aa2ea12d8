// Exchanges the token of the address for a key of this tab, then lets textual.js open its terminal with that key.
"use strict";

const KEPT = "uvcc-key";
const word = document.querySelector("#word");
const terminal = document.querySelector("#terminal");
let socket = null;

function tell(text) {
  word.textContent = text;
  document.body.classList.add("-told");
}

// textual.js opens its own WebSocket; the key goes along as a subprotocol, which no log of addresses keeps
function withKey(key) {
  const Plain = window.WebSocket;
  window.WebSocket = class extends Plain {
    constructor(url) {
      super(url, ["uvcc", "uvcc-key." + key]);
      socket = this;
      this.addEventListener("open", () => setTimeout(focus, 0));
    }
  };
}

// keys reach the terminal only while its text field has the focus: F9 must not need a click first
// and textual.js tells its server of the focus at once, which it cannot before it is connected
function focus() {
  const field = document.querySelector(".xterm-helper-textarea");
  if (field && socket && socket.readyState === socket.OPEN) field.focus();
}

async function open() {
  const token = location.hash.slice(1) || sessionStorage.getItem(KEPT) || "";
  history.replaceState(null, "", location.pathname);
  const answer = await fetch("/session", { method: "POST", body: JSON.stringify({ token }) });
  if (!answer.ok) {
    tell(await answer.text());
    return;
  }
  const { key } = await answer.json();
  sessionStorage.setItem(KEPT, key);
  withKey(key);
  terminal.dataset.sessionWebsocketUrl = "ws://" + location.host + "/ws";
  await document.fonts.load("14px 'Roboto Mono'");
  word.textContent = "This console has ended. Reload the page to open it again.";
  const script = document.createElement("script");
  script.src = "/textual.js";
  script.onload = () => {
    window.onload(new Event("load")); // it waits for the page, which has loaded already
    focus();
    new MutationObserver(focus).observe(document.body, { attributes: true, attributeFilter: ["class"] });
    window.addEventListener("focus", focus);
  };
  document.head.append(script);
}

open().catch((error) => tell("The page could not be opened: " + error));
