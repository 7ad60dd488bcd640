import { expect, test } from "bun:test";
import { COMMANDS, SERVE } from "../../commands.ts";
import { PAGES } from "../../gateway/manual/pages.ts";
import { grammarOf } from "../command-line.ts";
import { helpOn, helpText, meaningOf, searchHelp, shortHelp } from "./help.ts";

const topicText = (topic: string) => helpOn([topic], COMMANDS);

test("help lists every topic, and each is a page", () => {
  const text = helpText(COMMANDS, SERVE);
  for (const { name, summary, text: page } of PAGES) {
    expect(text).toMatch(new RegExp(`^  ${name} +${RegExp.escape(summary)}$`, "m"));
    expect(topicText(name)).toBe(page);
  }
  expect(topicText("Payments")).toBe(topicText("payments"));
});

test("help lists every command in each of its forms", () => {
  const text = helpText(COMMANDS, SERVE);
  for (const [name, { forms }] of Object.entries(COMMANDS)) {
    for (const form of forms) expect(text).toContain(`\n  ${`tollgate ${name} ${form}`.trimEnd()}\n`);
  }
  expect(text).toContain(`\n  tollgate ${SERVE.forms[0]}\n      run the gateway`);
});

test("an unknown topic is refused with the nearest one, or with all", async () => {
  for (const topic of ["paymets", "pay"]) {
    expect(topicText(topic)).toBeNull();
    await expect(searchHelp(topic, COMMANDS)).rejects.toThrow(
      `${topic} is neither a command nor a topic; did you mean payments?`,
    );
  }
  const names = PAGES.map(({ name }) => name).join(", ");
  for (const topic of ["xyzzy", "%", ""])
    await expect(searchHelp(topic, COMMANDS)).rejects.toThrow(
      `${topic} is neither a command nor a topic; the topics are ${names}`,
    );
});

test("a word that is no topic is looked for in the manual", async () => {
  for (const [wanted, page, heading] of [
    ["x402", "payments", "Pay for a call"],
    ["rate limit", "api", "Rate limits"],
    ["how do I pay", "payments", "Pay for a call"],
    ["error_class", "api", "Failed calls"],
  ] as const) {
    const text = await searchHelp(wanted, COMMANDS);
    expect(text).toStartWith(
      `${wanted} is neither a command nor a topic; these sections mention it; read the first with tollgate help `,
    );
    expect(text).toMatch(new RegExp(`^  ${page} +${heading}$`, "m"));
    expect(text.split("\n").length).toBeLessThan(12);
  }
});

test("the short help fits on a screen, and has each command with what it does", () => {
  const text = shortHelp(COMMANDS);
  const lines = text.split("\n");
  expect(lines.length - 1).toBeLessThanOrEqual(40);
  expect(lines.filter((line) => line.length > 120)).toEqual([]);
  for (const [name, { summary }] of Object.entries(COMMANDS)) {
    expect(text).toMatch(new RegExp(`^  ${name} +${RegExp.escape(summary)}$`, "m"));
  }
});

test("each command has help of its own, which explains each of its flags", () => {
  for (const [name, { forms, about }] of Object.entries(COMMANDS)) {
    const text = helpOn(name.split(" "), COMMANDS);
    for (const form of forms) expect(text).toContain(`tollgate ${name} ${form}`.trimEnd());
    expect(text).toContain(about);
    const flags = grammarOf(forms).known;
    expect([name, flags.filter((flag) => (meaningOf(name, flag) ?? "").length < 8)]).toEqual([name, []]);
    for (const flag of flags) expect(text).toMatch(new RegExp(`^  --${flag}[ \\n]`, "m"));
    expect(text).not.toContain("TOLLGATE_LOG_LEVEL");
  }
});

test("a group of commands has help that lists them, and a command names those that begin with it", () => {
  expect(helpOn(["account"], COMMANDS)).toMatch(/^Usage: tollgate account COMMAND/);
  expect(helpOn(["account"], COMMANDS)).toMatch(/^ {2}account add-cert +add a client certificate/m);
  expect(helpOn(["token"], COMMANDS)).toMatch(/^ {2}token revoke +revoke/m);
});
