// Puts a button on each block of code, in the manual and on the page at the root, which copies the code.
const COPIED_MS = 2000;

/** Read out by screen readers when its text changes. */
const said = document.getElementById("said");

/** Copies the text. A page that came from another machine without TLS may not use the clipboard, so it copies a selection. */
async function copy(text) {
  if (navigator.clipboard !== undefined) return navigator.clipboard.writeText(text);
  const area = document.createElement("textarea");
  area.value = text;
  area.className = "unseen";
  document.body.append(area);
  area.select();
  const isCopied = document.execCommand("copy");
  area.remove();
  if (!isCopied) throw new Error("the browser did not copy");
}

function addCopyButton(block) {
  const button = document.createElement("button");
  button.type = "button";
  button.textContent = "Copy";
  button.addEventListener("click", async () => {
    const text = block.querySelector("code").textContent.replace(/\n$/, "");
    const outcome = await copy(text).then(
      () => "Copied",
      () => "Not copied",
    );
    button.focus();
    button.textContent = outcome;
    said.textContent = outcome;
    setTimeout(() => {
      button.textContent = "Copy";
      said.textContent = "";
    }, COPIED_MS);
  });
  block.append(button);
}
for (const block of document.querySelectorAll(".code")) addCopyButton(block);
