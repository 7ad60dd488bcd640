import { expect, test } from "bun:test";
import { COMMANDS, SERVE } from "../commands.ts";
import { PAGES } from "../gateway/manual/pages.ts";
import { helpText, topicText } from "./help.ts";

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

test("an unknown topic is refused with the nearest one, or with all", () => {
  expect(() => topicText("paymets")).toThrow("paymets is not a topic; did you mean payments?");
  const names = PAGES.map(({ name }) => name).join(", ");
  expect(() => topicText("weather")).toThrow(`weather is not a topic; the topics are ${names}`);
});
