import { describe, expect, test } from "bun:test";
import fc from "fast-check";
import { isAllowedUrl, parseAllowedHosts } from "./host.ts";

const hostsOf = (...entries: string[]) => {
  const parsed = parseAllowedHosts(entries);
  if (!parsed.ok) throw new Error(parsed.reason);
  return parsed.hosts;
};
const allows = (url: string, ...entries: string[]) => isAllowedUrl(url, hostsOf(...entries));

describe("a list of allowed hosts", () => {
  test("keeps each host once, in the spelling of URLs", () => {
    expect(hostsOf("API.Example.com.", "api.example.com", "*.Bücher.test", "bücher.test", "0x7f.1", "::1")).toEqual([
      "api.example.com",
      "*.xn--bcher-kva.test",
      "xn--bcher-kva.test",
      "127.0.0.1",
      "[::1]",
    ]);
    expect(hostsOf("[2001:DB8:0::1]", "2001:db8::1")).toEqual(["[2001:db8::1]"]);
  });

  test("has 1 to 32 entries", () => {
    const many = Array.from({ length: 33 }, (_, index) => `h${index}.test`);
    expect(parseAllowedHosts([])).toMatchObject({ ok: false, index: null });
    expect(parseAllowedHosts(many)).toMatchObject({ ok: false, index: null });
    expect(parseAllowedHosts(many.slice(1)).ok).toBe(true);
  });

  const wrong = ["", ".", "*", "*.", "**.a.test", "*a.test", "a.*.test", "a.*", "*.*.test", "*.127.0.0.1", "*.[::1]"];
  const more = [
    "a.test:443",
    "http://a.test",
    "a.test/",
    "u@a.test",
    "a b",
    "a..test",
    "[::1",
    "::g",
    "%61.test",
    "a\n",
    "*.5",
  ];
  test.each([...wrong, ...more, "x".repeat(64), `${"a.".repeat(127)}test`])("refuses %j, and says where", (entry) => {
    expect(parseAllowedHosts(["a.test", entry])).toMatchObject({ ok: false, index: 1 });
  });
});

describe("a URL's host", () => {
  test.each([
    ["https://api.example.com/x", "api.example.com"],
    ["http://API.example.COM.:8443/", "api.example.com"],
    ["https://api.example.com", "API.EXAMPLE.COM."],
    ["https://b%C3%BCcher.test/", "xn--bcher-kva.test"],
    ["https://xn--bcher-kva.test/", "bücher.test"],
    ["http://[0:0::1]:9/", "::1"],
    ["http://0x7f000001/", "127.0.0.1"],
    ["https://a.example.com/", "*.example.com"],
    ["https://a.b.example.com./", "*.example.com"],
  ])("%s is on the list %s", (url, host) => {
    expect(allows(url, host)).toBe(true);
  });

  test.each([
    ["https://example.com/", "*.example.com"],
    ["https://badexample.com/", "*.example.com"],
    ["https://a.example.com/", "example.com"],
    ["https://example.com.evil.test/", "example.com"],
    ["https://evil.test/?api.example.com", "api.example.com"],
    ["https://evil.test#api.example.com", "api.example.com"],
    ["https://api.example.com@evil.test/", "api.example.com"],
    ["https://api.example.com:pw@evil.test/", "api.example.com"],
    ["https://evil.test\\@api.example.com/", "api.example.com"],
    ["http://[::ffff:127.0.0.1]/", "127.0.0.1"],
    ["nothing", "nothing"],
    ["https:///", "a.test"],
    ["https://.example.com/", "*.example.com"],
  ])("%s is not on the list %s", (url, host) => {
    expect(allows(url, host)).toBe(false);
  });

  const label = fc.stringMatching(/^[a-z]([a-z0-9-]{0,8}[a-z0-9])?$/).filter((text) => !text.startsWith("xn--"));
  const name = fc.array(label, { minLength: 1, maxLength: 4 }).map((labels) => labels.join("."));
  const disguise = fc.constantFrom(
    (text: string) => text,
    (text: string) => text.toUpperCase(),
    (text: string) => `${text}.`,
    (text: string) => text.replaceAll(".", "。"),
    (text: string) => `${text}:8443`,
  );

  test("is compared whatever its spelling and port; a wildcard holds for just the names under its own", () => {
    fc.assert(
      fc.property(name, name, disguise, (one, other, disguised) => {
        const url = `https://${disguised(one)}/`;
        expect(allows(url, one)).toBe(true);
        expect(allows(url, other)).toBe(one === other);
        expect(allows(url, `*.${other}`)).toBe(one.endsWith(`.${other}`));
        expect(allows(`https://${disguised(`${one}.${other}`)}/`, `*.${other}`)).toBe(true);
      }),
    );
  });
});
