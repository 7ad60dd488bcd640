import { expect, test } from "bun:test";
import { PAGES } from "../gateway/manual/pages.ts";
import { helpText, topicText } from "./help.ts";

test("help lists every topic, and each is a page", () => {
  const text = helpText();
  for (const { name, summary, text: page } of PAGES) {
    expect(text).toMatch(new RegExp(`^  ${name} +${RegExp.escape(summary)}$`, "m"));
    expect(topicText(name)).toBe(page);
  }
  expect(topicText("Payments")).toBe(topicText("payments"));
});

test("an unknown topic is refused with the nearest one, or with all", () => {
  expect(() => topicText("paymets")).toThrow("paymets is no topic; did you mean payments?");
  const names = PAGES.map(({ name }) => name).join(", ");
  expect(() => topicText("weather")).toThrow(`weather is no topic; the topics are ${names}`);
});
