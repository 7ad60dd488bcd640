import { expect, test } from "bun:test";
import { leadsBack } from "./headers.ts";

const HOSTS = ["gate.example:8443", "127.0.0.1:8080"];

test.each([
  "/v1/agents/agt_1",
  "../../agents/agt_1",
  "stream",
  "//gate.example:8443/v1/agents",
  "http:/v1/agents",
  "\\\\gate.example:8443\\v1\\agents",
  "https://GATE.example:8443/prefix/v1/agents",
  "http://user@127.0.0.1:8080/v1/../v1/agents?a#b",
  "/\t/127.0.0.1:8080/v1/agents",
])("%s leads back to the gateway", (location) => {
  expect(leadsBack(location, HOSTS)).toBe(true);
});

test.each([
  "/elsewhere",
  "https://other.example/v1/agents",
  "http://127.0.0.1:8081/v1/agents",
  "https://gate.example:8443/docs",
  "http://",
])("%s does not", (location) => {
  expect(leadsBack(location, HOSTS)).toBe(false);
});

test("a port that goes without saying is none", () => {
  expect(leadsBack("https://gate.example:443/v1/agents", ["gate.example"])).toBe(true);
  expect(leadsBack("https://gate.example/v1/agents", ["gate.example:443"])).toBe(true);
});
